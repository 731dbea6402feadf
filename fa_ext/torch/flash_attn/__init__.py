"""FlashAttention 2's Python interface, on fa_ext: ``from fa_ext.torch.flash_attn import flash_attn_func``.

``install()`` makes ``import flash_attn`` itself mean this package. The interface of FlashAttention 3 is
``fa_ext.torch.flash_attn_interface``, those of vLLM's and SGLang's copies ``fa_ext.torch.vllm_flash_attn`` and ``.sgl_flash_attn``.
"""

from ._install import install, uninstall
from .flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

#: The release whose interface this is.
__version__ = "2.8.4"

__all__ = [
    "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache", "install", "uninstall",
]  # fmt: skip
