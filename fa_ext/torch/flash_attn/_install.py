"""install(): the names ``flash_attn`` and ``flash_attn_interface`` for the modules here."""

import importlib
import sys

#: The name that others import: the module here.
_MODULES = {
    "flash_attn": "fa_ext.torch.flash_attn",
    "flash_attn.flash_attn_interface": "fa_ext.torch.flash_attn.flash_attn_interface",
    "flash_attn.bert_padding": "fa_ext.torch.flash_attn.bert_padding",
    "flash_attn.layers": "fa_ext.torch.flash_attn.layers",
    "flash_attn.layers.rotary": "fa_ext.torch.flash_attn.layers.rotary",
    "flash_attn_interface": "fa_ext.torch.flash_attn_interface",
}


def install():
    """From now on ``import flash_attn`` and ``import flash_attn_interface`` find the modules here, in this process. A second
    call changes nothing.

    Raises
    ------
    RuntimeError
        Where FlashAttention itself was imported before.
    """
    modules = {name: importlib.import_module(here) for name, here in _MODULES.items()}
    others = [
        name for name, module in sys.modules.items()
        if name.partition(".")[0] in ("flash_attn", "flash_attn_interface") and module is not modules.get(name)
    ]  # fmt: skip
    if others:
        raise RuntimeError(f"{', '.join(sorted(others))} of FlashAttention itself is imported; accepted: install() before that")
    sys.modules.update(modules)


def uninstall():
    """Undoes ``install()``: what was imported in between stays as it is."""
    for name, here in _MODULES.items():
        if name in sys.modules and sys.modules[name] is sys.modules.get(here):
            del sys.modules[name]
