"""How a call is mapped (vmap) and split over devices (sharded jit)."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from .._operands import AXES, DIFFERENTIABLE, IDS, OPERANDS, STATE, Axis, axes_of, batch_is_shared, filled, has_batch
from ._calls import GRADIENTS, Call, run

#: Shardy's factors of axes that are split over devices or belong together: heads are (g r), g those of k and v.
_FACTORS = {"B": "b", "Hk": "g", "Sq": "s", "Sk": "t", "D": "d", "Dv": "e"}
#: The operand that a gradient is of.
_SUBJECTS = dict(zip(GRADIENTS, DIFFERENTIABLE, strict=True))
_DATA = frozenset(name for name, operand in OPERANDS.items() if operand.role == "data")
#: The rows of all sequences in one.
_ROWS = Axis("rows", one=False, optional=False)
#: Whether ``def_partition`` takes the sizes of a rule's factors, as from JAX 0.7.2; before, they go into a rule that is parsed.
_TAKES_SIZES = "factor_sizes" in inspect.signature(custom_partitioning.def_partition).parameters
if not _TAKES_SIZES:
    try:
        from jax._src.custom_partitioning_sharding_rule import str_to_sdy_sharding_rule as _parsed
    except ImportError:
        _parsed = None  # GSPMD is the partitioner


@functools.cache
def operation(call: Call):
    """A function of the operands of a call that can be mapped and partitioned; a tuple of results."""

    @custom_vmap
    def mapped(*operands):
        if _inside_shard_map() or any(0 in x.shape for x in operands):
            return run(call, *operands)
        groups = _groups(call, operands)
        shapes = [*(x.shape for x in operands), *(shape for shape, _ in call.shapes(operands).values())]
        return _partitioned(call, groups, _rule(call, groups, shapes))(*operands)

    @mapped.def_vmap
    def rule(size, batched, *operands):
        results = _one_by_one if _needs_each(call, batched, operands) else _folded
        made = results(call, size, batched, operands)
        return made, (True,) * len(made)

    # Of the forward too: it makes what the backward pass reads. Its own derivative is the custom_vjp around it.
    once = jax.custom_jvp(mapped)

    @once.defjvp
    def refuse(primals, tangents):
        raise NotImplementedError(
            "fa_ext.jax.attention has no second derivatives: its gradient cannot be differentiated; use "
            "jax.nn.dot_product_attention where you need them"
        )

    return once


# ---- vmap ----


def _needs_each(call, batched, operands) -> bool:
    """Whether elements of the mapped axis need calls of their own: the batch shares what has no axis for it, and sums what a
    gradient's subject has once; what is dropped follows from where in the batch an entry is; packed sequences have no batch."""
    mapped = dict(zip(call.names, batched, strict=True))
    shapes = {name: x.shape[mapped[name] :] for name, x in zip(call.names, operands, strict=True)}
    if STATE in call.names or _is_packed(shapes):
        return True
    shared = [name for name in call.names if not has_batch(name)]
    wanted = [_SUBJECTS[result] for result in call.results if result in _SUBJECTS]
    return any(mapped[name] or name in wanted for name in shared) or any(shapes[name][0] != shapes["q"][0] for name in wanted)


def _one_by_one(call, size, batched, operands):
    return _each(call, tuple(batched))(*operands)


@functools.cache
def _each(call, batched):
    """A call for each element, compiled once: JAX keeps what it compiles by the function, also where vmap is not under jit."""

    @jax.jit
    def every(*operands):
        def one(slices):
            left = iter(slices)
            return operation(call)(*(next(left) if mapped else x for x, mapped in zip(operands, batched, strict=True)))

        return jax.lax.map(one, tuple(x for x, mapped in zip(operands, batched, strict=True) if mapped))

    return every


def _folded(call, size, batched, operands):
    """One call whose batch is the mapped axis and the batch."""
    batch = operands[0].shape[batched[0]]

    def fold(name, x, mapped):
        own = x.shape[mapped:]
        if not mapped and batch_is_shared(name, own) and f"d{name}" not in call.results:
            return x
        x = x.reshape(*x.shape[:mapped], *filled(name, own))
        x = jnp.broadcast_to(x if mapped else x[None], (size, batch, *x.shape[1 + mapped :]))
        return x.reshape(size * batch, *x.shape[2:])

    made = operation(call)(*map(fold, call.names, operands, batched))
    return tuple(x.reshape(size, batch, *x.shape[1:]) for x in made)


# ---- sharding ----


def _inside_shard_map() -> bool:
    """Whether mesh axes are manual here: the operands are shards already."""
    found = getattr(jax.sharding, "get_abstract_mesh", lambda: None)()
    return bool(getattr(found, "manual_axes", ()))


def _outside_meshes():
    """A context in which arrays are of no mesh that jax.set_mesh made, as shards are: JAX 0.8 takes them for such and fails."""
    if not hasattr(jax.sharding, "use_abstract_mesh"):
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def _is_packed(shapes) -> bool:
    """Whether the sequences of q or of k lie in one row of rows, of shapes by name: then no operand has an axis that is the batch's."""
    return len(shapes["q"]) == 3 or len(shapes["k"]) == 3


def _groups(call, operands) -> tuple[int, int]:
    """(heads_kv, query heads that share one)"""
    named = dict(zip(call.names, operands, strict=True))
    heads, heads_kv = (named[name].shape[call.heads_axis(named[name].ndim)] for name in "qk")
    return heads_kv, heads // heads_kv


def _axes(call, name: str, ndim: int):
    """The axes of an operand or a result as it lies in memory."""
    name = _SUBJECTS.get(name, name)
    if name in _DATA and ndim < len(AXES[name]):
        _, heads, _, *width = AXES[name]
        return [_ROWS, heads, *width] if width else [heads, _ROWS]
    axes = list(axes_of(name, ndim))
    if len(axes) == 4 and axes[3].name in ("D", "Dv") and call.heads_axis(4) == 2:
        axes[1], axes[2] = axes[2], axes[1]
    return axes


def _rule(call, groups, shapes) -> str:
    """Shardy's rule."""
    heads = "g" if groups[1] == 1 else "r" if groups[0] == 1 else "(g r)"  # Shardy has no products with a factor of 1
    known = _FACTORS | {"H": heads}
    if _is_packed(dict(zip(call.names, shapes))):
        del known["B"]
    ones = iter(range(1000))

    def factor(axis, extent):
        return f"x{next(ones)}" if axis.name not in known or (axis.one and extent == 1) else known[axis.name]

    def factors(name, shape):
        return " ".join(factor(axis, extent) for axis, extent in zip(_axes(call, name, len(shape)), shape, strict=True))

    named = [factors(name, shape) for name, shape in zip((*call.names, *call.results), shapes, strict=True)]
    return f"{', '.join(named[: len(call.names)])} -> {', '.join(named[len(call.names) :])}"


def _shardy(rule, sizes) -> dict:
    """The arguments by which ``def_partition`` gets a rule of Shardy."""
    if _TAKES_SIZES:
        return {"sharding_rule": rule, **sizes}
    return {"sharding_rule": _parsed(rule, **sizes)} if _parsed else {}


class _Split:
    """The mesh axes that the batch and the heads of a call are split over; nothing else is."""

    def __init__(self, call, groups, shardings, shapes):
        self.call = call
        self.batch, self.heads = (), ()
        sizes = dict(zip(call.names, shapes, strict=True))
        # Dropout counts documents, and a shard does not know how many there are before it.
        whole = _is_packed(sizes) or (IDS in sizes and STATE in sizes)
        for name, sharding in zip(call.names, shardings, strict=True):
            batch, heads = self._places(name, len(sizes[name]))
            if batch is not None and not whole and not self.batch and sizes[name][batch] > 1:
                self.batch = self._parts(sharding, batch, sizes["q"][0])
            if heads is not None and not self.heads and sizes[name][heads] > 1:
                self.heads = self._parts(sharding, heads, groups[0])
        self.heads = () if set(self.heads) & set(self.batch) else self.heads

    def _places(self, name, ndim):
        """The axes of batch and heads of an array, None where it has none."""
        names = [axis.name for axis in _axes(self.call, name, ndim)]
        heads = "Hk" if "Hk" in names else "H"
        return tuple(names.index(axis) if axis in names else None for axis in ("B", heads))

    @staticmethod
    def _parts(sharding, axis, extent):
        """Names of the mesh axes that an axis is split over, if they divide its extent."""
        spec = getattr(sharding, "spec", ())
        entry = spec[axis] if axis < len(spec) else None
        names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        parts = math.prod(sharding.mesh.shape[name] for name in names)
        return names if parts > 1 and extent % parts == 0 else ()

    def spec(self, name, shape) -> PartitionSpec:
        entries = [None] * len(shape)
        for place, names in zip(self._places(name, len(shape)), (self.batch, self.heads), strict=True):
            if place is not None and names and shape[place] > 1:
                entries[place] = names
        return PartitionSpec(*entries)

    def summed(self, name, shape) -> tuple[str, ...]:
        """Mesh axes over which shards of a gradient are to be added."""
        if name not in _SUBJECTS:
            return ()
        places = self._places(name, len(shape))
        whole = [place is None or (_axes(self.call, name, len(shape))[place].one and shape[place] == 1) for place in places]
        return (self.batch if whole[0] else ()) + (self.heads if whole[1] else ())


@functools.cache
def _partitioned(call: Call, groups, rule: str):
    """The call as a function that XLA's partitioner splits over batch and heads, whatever else is sharded."""

    def function(*operands):
        return run(call, *operands)

    def specs(split, operands, results):
        return ([split.spec(n, x.shape) for n, x in zip(call.names, operands, strict=True)],
                [split.spec(n, x.shape) for n, x in zip(call.results, results, strict=True)])  # fmt: skip

    def split_of(operands):
        return _Split(call, groups, [x.sharding for x in operands], [x.shape for x in operands])

    def infer(mesh, operands, results):
        return tuple(NamedSharding(mesh, spec) for spec in specs(split_of(operands), operands, results)[1])

    def partition(mesh, operands, results):
        split = split_of(operands)
        arguments, made = specs(split, operands, results)
        totals = [split.summed(name, x.shape) for name, x in zip(call.results, results, strict=True)]

        def shard(*shards):
            with _outside_meshes():
                if STATE in call.names:
                    shards = (*shards[:-1], _placed(shards[-1], shards[0], split, call.heads_axis(shards[0].ndim), groups))
                return tuple(_total(x, axes) for x, axes in zip(run(call, *shards), totals, strict=True))

        return (mesh, shard, tuple(NamedSharding(mesh, spec) for spec in made),
                tuple(NamedSharding(mesh, spec) for spec in arguments))  # fmt: skip

    made = custom_partitioning(function)
    sizes = {"r": groups[1]} if min(groups) > 1 else {}  # g is an axis of k
    made.def_partition(partition, infer_sharding_from_operands=infer, **_shardy(rule, sizes))
    return made


def _placed(state, q, split, heads_axis, groups):
    """The state of dropout of a shard: its part of the mask of the whole."""
    batch = jax.lax.axis_index(split.batch) * q.shape[0] if split.batch else 0
    heads = jax.lax.axis_index(split.heads) * q.shape[heads_axis] if split.heads else 0
    every = jnp.where(state[7] == 0, jnp.asarray(math.prod(groups), state.dtype), state[7])
    return state.at[3].add(jnp.asarray(batch, state.dtype)).at[4].add(jnp.asarray(heads, state.dtype)).at[7].set(every)


def _total(x, axes):
    """The sum over mesh axes, of half precision in float32."""
    if not axes:
        return x
    return jax.lax.psum(x.astype(jnp.promote_types(x.dtype, jnp.float32)), axes).astype(x.dtype)
