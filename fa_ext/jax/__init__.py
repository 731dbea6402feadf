"""Attention in JAX: ``attention``, and ``dot_product_attention``, which has the signature of ``jax.nn``'s; ``documents`` makes
sequences of ids.

They run the kernels of ``fa_ext`` as custom calls of XLA, on the CPU and on CUDA devices, under ``jit``, ``grad``, ``vmap``,
``scan``, ``checkpoint``, sharded ``jit`` and ``shard_map``. Gradients are those of ``fa_ext.attention_backward``.
"""

OLDEST = (0, 5, 0)
_NEEDS = (
    "fa_ext.jax needs jax and jaxlib {}.{}.{} or newer, {}; run pip install 'fa_ext[jax]', or install jax with CUDA first "
    "(pip install 'jax[cuda13]')"
)

try:
    import jax
except ImportError as error:
    if error.name != "jax":
        raise
    raise ImportError(_NEEDS.format(*OLDEST, "and there is no jax here"), name="jax") from None

if jax.__version_info__[:3] < OLDEST:
    raise ImportError(_NEEDS.format(*OLDEST, f"but jax here is {jax.__version__}"), name="jax")

from ._attention import attention, dot_product_attention
from ._documents import documents

__all__ = ["attention", "documents", "dot_product_attention"]
