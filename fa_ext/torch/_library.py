"""How operators come to ``torch.ops.fa_ext``.

``torch.library.custom_op`` puts a layer around the kernel that looks for aliases among its results, and one above it for autograd,
also where there is no derivative: about as long as the kernel and torch's dispatcher take on the host (``bench/log/calls.md``).
"""

import inspect
from typing import Optional

import torch
from torch import Tensor
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.autograd.graph import increment_version

LIBRARY = torch.library.Library("fa_ext", "FRAGMENT")
_BACKENDS = (torch.DispatchKey.CPU, torch.DispatchKey.CUDA)


def operator(name, fake, mutates=(), keep=None, differentiate=None, draws=False, others=()):
    """Decorates the kernel of ``torch.ops.fa_ext.<name>`` for the CPU and CUDA, from whose signature the operator has its own, and
    returns the operator. ``fake``: makes results of the shapes it will have. ``mutates``: names of the arguments that are written.
    ``keep(ctx, inputs, output)`` and ``differentiate(ctx, *cotangents)``: those of ``torch.library.register_autograd``.
    ``draws``: it takes no tensors, and draws from a generator of torch. ``others``: names of tensors that may be absent, which come
    as the kernel's last parameter, ``*others``; torch leaves those at the end out that are None."""

    def define(kernel):
        own = inspect.signature(kernel)
        names = list(own.parameters)
        if others:
            kinds = dict(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=Optional[Tensor])
            listed = [inspect.Parameter(other, **kinds) for other in others]
            kernel.__signature__ = own.replace(parameters=[*list(own.parameters.values())[:-1], *listed])
        places = [names.index(argument) for argument in mutates]

        def writing(*args):
            kernel(*args)
            wrote(*[args[place] for place in places])

        tags = (torch.Tag.pt2_compliant_tag, *((torch.Tag.nondeterministic_seeded,) if draws else ()))
        LIBRARY.define(name + torch.library.infer_schema(kernel, mutates_args=mutates), tags=tags)
        for key in ("CompositeExplicitAutograd",) if draws else (backend.name for backend in _BACKENDS):
            LIBRARY.impl(name, writing if mutates else kernel, key)
        torch.library.register_fake(f"fa_ext::{name}", fake, lib=LIBRARY)
        made = getattr(torch.ops.fa_ext, name).default
        if differentiate:
            LIBRARY.impl(name, _differentiable(made, kernel, keep, differentiate), "Autograd", with_keyset=True)
        return made

    return define


def _differentiable(made, kernel, keep, differentiate):
    """The operator's kernel for autograd. Where nothing is differentiated, in either mode, and nothing but the backend is left below,
    as in a compiled graph, it is the operator's kernel itself; what ``register_autograd`` makes goes through the dispatcher once
    more."""
    below_autograd, transformed = torch._C._after_autograd_keyset, torch._C._are_functorch_transforms_active
    name = made.name().partition("::")[2]

    def below(keys, args):
        with torch._C._AutoDispatchBelowAutograd():
            return made.redispatch(keys, *args)

    class Differentiable(_SingleLevelFunction):
        @staticmethod
        def forward(ctx, *args_and_keys):
            *args, keys = args_and_keys
            if transformed():
                with torch.enable_grad():  # for the transforms around this one: forward() has it off
                    output = below(keys, args)
            else:
                output = below(keys, args)
            keep(ctx, args, output)
            return tuple(output)

        @staticmethod
        def backward(ctx, *cotangents):
            return (*differentiate(ctx, *cotangents), None)

        @staticmethod
        def jvp(ctx, *tangents):
            raise NotImplementedError(f"torch.ops.fa_ext.{name} has no forward-mode derivative (jvp); reverse mode works")

    def call(keys, *args):
        keys = keys & below_autograd
        if (torch.is_grad_enabled() and torch._C._any_requires_grad(*args)) or forward_ad._current_level >= 0:
            if not transformed():
                return Differentiable.apply(*args, keys)
            with enable_single_level_autograd_function():  # of the transform that the dispatcher is at; the others follow below
                return Differentiable.apply(*args, keys)
        if keys.highestPriorityTypeId() in _BACKENDS:
            return kernel(*args)
        return below(keys, args)

    return call


def wrote(*tensors):
    """Tells autograd of tensors (or None) that were written in place: it refuses then what it kept of them for a backward pass."""
    increment_version([x for x in tensors if x is not None])
