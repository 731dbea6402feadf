"""fa_ext in PyTorch: attention with gradients, under torch.compile, autocast, checkpointing and torch.func.

``attention`` takes every option of ``fa_ext.attention`` and is differentiable; ``scaled_dot_product_attention`` has
torch's own signature and meaning, and ``with sdpa():`` puts it in the place of torch's; ``explain`` says what runs a call
of it, and why; ``varlen_attn`` has that of torch's attention over packed sequences; ``register_transformers`` makes it an attention
implementation of Hugging Face transformers, "fa_ext". ``append``, ``merge``, ``documents``, ``document_intervals`` and ``attention`` over paged caches are
``fa_ext``'s, in compiled graphs too.
Nothing of torch is patched but ``torch.overrides.has_torch_function``, while blocks of ``sdpa()`` are open. Needs PyTorch
2.10 or newer.
"""

try:
    import torch
except ImportError as error:
    if error.name != "torch":
        raise
    raise ImportError(
        "fa_ext.torch needs PyTorch 2.10 or newer, which is not installed; run: pip install 'torch>=2.10'", name="torch"
    ) from None

if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10):
    raise ImportError(
        f"fa_ext.torch needs PyTorch 2.10 or newer, found {torch.__version__}; run: pip install 'torch>=2.10'", name="torch"
    )

from ._attention import attention
from ._sdpa import explain, scaled_dot_product_attention, sdpa
from ._serving import append, document_intervals, documents, merge
from ._transformers import register_transformers
from ._varlen import varlen_attn

__all__ = [
    "append", "attention", "document_intervals", "documents", "explain", "merge", "register_transformers",
    "scaled_dot_product_attention", "sdpa", "varlen_attn",
]  # fmt: skip
