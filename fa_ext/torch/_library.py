"""How operators come to ``torch.ops.fa_ext``.

``torch.library.custom_op`` puts a layer around the kernel that looks for aliases among its results, and one above it for autograd,
also where there is no derivative: about as long as the kernel and torch's dispatcher take on the host (``bench/LOG.md``).
"""

import inspect

import torch
from torch.autograd.graph import increment_version

LIBRARY = torch.library.Library("fa_ext", "FRAGMENT")


def operator(name, fake, mutates=()):
    """Decorates the kernel of ``torch.ops.fa_ext.<name>`` for the CPU and CUDA, from whose signature the operator has its own, and
    returns the operator. ``fake``: makes results of the shapes it will have. ``mutates``: names of the arguments that are written."""

    def define(kernel):
        names = list(inspect.signature(kernel).parameters)
        places = [names.index(argument) for argument in mutates]

        def writing(*args):
            kernel(*args)
            wrote(*[args[place] for place in places])

        LIBRARY.define(name + torch.library.infer_schema(kernel, mutates_args=mutates), tags=(torch.Tag.pt2_compliant_tag,))
        for key in ("CPU", "CUDA"):
            LIBRARY.impl(name, writing if mutates else kernel, key)
        torch.library.register_fake(f"fa_ext::{name}", fake, lib=LIBRARY)
        return getattr(torch.ops.fa_ext, name).default

    return define


def wrote(*tensors):
    """Tells autograd of tensors (or None) that were written in place: it refuses then what it kept of them for a backward pass."""
    increment_version([x for x in tensors if x is not None])
