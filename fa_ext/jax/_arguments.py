"""The checks of the arguments of ``fa_ext.jax``: each returns its argument as it is used, or refuses it in words."""

from __future__ import annotations

import operator

import jax
import jax.numpy as jnp
import numpy as np

from .. import kernels
from .._operands import OPERANDS, OPTIONS, SEQUENCES, operand_pair

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_ANY_FLOAT = "float16, bfloat16, float32, and float64 on the CPU"
_KEY = "one PRNG key, or a state of shape (8,), uint32 or int32"
#: Keywords that are pairs of index arrays: the operands behind them, the words for those in messages, and what is accepted.
_PAIRS = {
    "k_range": (("k_range_begin", "k_range_end"), ("k_range's begin", "k_range's end"),
                "None or a pair (begin, end), each an array of int32, (batch,), or None"),
    "segments": (("q_segments", "k_segments"), ("segments' q_ids", "segments' k_ids"),
                 "None or a pair of arrays of int32 (q_ids, k_ids), (batch, seq_q) and (batch, seq_k)"),
}  # fmt: skip
_SIDE = "an int >= 0 or None for unbounded"
_FARTHEST = 1 << 60  #: a side of a window that is unbounded in every call


# ---- arrays ----


def array(name, given):
    """An array of JAX whose shape is known while tracing."""
    if given is None:
        raise TypeError(f"{name} is None; accepted: an array")
    try:
        made = jnp.asarray(given)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} has type {type(given).__name__}; accepted: an array") from error
    if not all(isinstance(extent, int) for extent in made.shape):
        raise TypeError(f"{name} has shape {made.shape}, which is symbolic; accepted: sizes that are known while tracing")
    return made


def arrays(given):
    """Arrays of those that are there, with dtypes that the library has names for."""
    made = {name: array(name, x) for name, x in given.items() if x is not None or name in "qkv"}
    for name, x in made.items():
        words = OPERANDS[name].dtypes if name in OPTIONS else _ANY_FLOAT
        if name in OPTIONS and words.endswith("float32") and x.weak_type and x.dtype.kind != "c":
            made[name] = x = beside(x, jnp.float32 if words == "float32" else made["q"].dtype)
        if x.dtype.name not in (*_FLOATS, "bool") and x.dtype.name not in words:
            raise TypeError(f"{name} has dtype {x.dtype.name}; accepted: {words}")
        if name in "qkv" and x.ndim not in (3, 4):
            raise ValueError(
                f"{name} has {x.ndim} dimensions, shape {x.shape}; accepted: 4, the first of them batch, of 1 for a single "
                "entry, or 3 for packed sequences"
            )
    return made


def indices(pairs, given):
    """The index arrays that are there, by the names of operands, int32. ``pairs``: those of ``_PAIRS``, by keyword."""
    words = {}
    for keyword, pair in pairs.items():
        if pair is None:
            continue
        names, said, accepted = _PAIRS[keyword]
        given = given | operand_pair(keyword, pair, names, accepted)
        words |= zip(names, said, strict=True)
    return {name: index(words.get(name, name), given[name]) for name in SEQUENCES if given.get(name) is not None}


def index(name, given):
    made = array(name, given)
    if made.dtype not in (jnp.int32, jnp.int64):
        raise TypeError(f"{name} has dtype {made.dtype.name}; accepted: int32, or int64, which is converted")
    return made.astype(jnp.int32)


def beside(x, dtype):
    """An array that is added to scores, of a dtype that is taken where q has ``dtype``."""
    if x.dtype in (dtype, jnp.float32):
        return x
    return x.astype(dtype if dtype == jnp.float64 else jnp.float32)


def documents(given, arrays, layout):
    """The ids of documents, (B, S), of a call with these arrays."""
    if isinstance(given, tuple):
        if len(given) != 2 or given[0] is not given[1]:
            raise ValueError("segment_ids is a tuple; accepted: an array, (batch, sequence), or a pair of one and the same array")
        given = given[0]
    ids = array("segment_ids", given)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"segment_ids has dtype {ids.dtype.name}; accepted: integers")
    others = [name for name in arrays if name not in (*"qkv", "sinks", "alibi")]
    if others:
        name = others[0].replace("_begin", "").replace("_end", "")
        raise ValueError(f"{name} is given beside segment_ids; accepted with segment_ids: sinks, alibi and dropout")
    rows = 1 if layout == "bshd" else 2
    for name in "qk":
        x = arrays[name]
        if x.ndim != 4 or ids.shape != (x.shape[0], x.shape[rows]):
            raise ValueError(
                f"segment_ids has shape {ids.shape}, and {name} {x.shape}; accepted: (batch, sequence), the same of queries and keys"
            )
    if "alibi" in arrays and arrays["alibi"].ndim != 1:
        raise ValueError(f"alibi has shape {arrays['alibi'].shape}; accepted with segment_ids: (heads,)")
    return ids


def state(given):
    """The eight words {seed low, seed high, offset, b0, h0, i0, j0, heads} that dropout is drawn from."""
    if not (isinstance(given, (jax.Array, np.ndarray)) or hasattr(given, "__jax_array__")):
        raise TypeError(f"dropout's key has type {type(given).__name__}; accepted: {_KEY}")
    if not isinstance(given, np.ndarray):  # whose wider integers JAX would cut off
        given = jnp.asarray(given)
    if given.shape == (8,) and given.dtype in (jnp.uint32, jnp.int32):
        return jnp.asarray(given).astype(jnp.uint32)
    if jnp.issubdtype(given.dtype, jax.dtypes.prng_key):
        single = given.shape == ()
    else:
        raw = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
        single = (given.shape, given.dtype) == (raw.shape, raw.dtype)
    if not single:
        raise ValueError(f"dropout's key has shape {given.shape} and dtype {given.dtype}; accepted: {_KEY}")
    return jnp.concatenate([jax.random.bits(given, (2,), jnp.uint32), jnp.zeros(6, jnp.uint32)])


# ---- values ----


def _known(name, value, kind):
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{name} is traced; accepted: {kind} that is known while tracing")


def number(name, value, accepted):
    """A float."""
    _known(name, value, "a number")
    try:
        if not isinstance(value, (str, bytes, bool, np.bool_)):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise TypeError(f"{name} is {value!r}; accepted: {accepted}")


def count(name, value):
    """An int >= 0, or None; no sequence is as long as the largest."""
    accepted = "an int >= 0, or None"
    _known(name, value, "an int")
    try:
        made = None if value is None or isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        made = None
    if made is None and value is not None:
        raise TypeError(f"{name} is {value!r}; accepted: {accepted}")
    if made is not None and made < 0:
        raise ValueError(f"{name} is {made}; accepted: {accepted}")
    return made if made is None else min(made, _FARTHEST)


def flag(name, value):
    _known(name, value, "True or False")
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} is {value!r}; accepted: True or False")
    return bool(value)


def _name(name, value, names, others=()):
    _known(name, value, "a value")
    if not any(value is other for other in others) and not (isinstance(value, str) and value in names):
        raise ValueError(f"{name} is {value!r}; accepted: {', '.join(map(repr, (*others, *names)))}")
    return value


def causal(value):
    return _name("causal", bool(value) if isinstance(value, np.bool_) else value, ("top_left", "bottom_right"), (False, True))


def layout(value):
    return _name("layout", value, ("bhsd", "bshd"))


def kernel(name, value, operation):
    names = kernels(operation)
    if value is not None and not (isinstance(value, str) and value in names):
        raise ValueError(f"{name} is {value!r}, which names no kernel of this build; accepted: {', '.join(names)}")
    return value


def _sides(name, values, accepted):
    """(left, right) as ints, or None."""
    made = []
    for side, value in zip(("left", "right"), values, strict=True):
        _known(f"{name}'s {side}", value, "an int")
        try:
            index = None if value is None else operator.index(value)
        except TypeError:
            index = False
        if isinstance(value, (bool, np.bool_)) or index is False:
            raise TypeError(f"{name}'s {side} is {value!r}; accepted: {accepted}")
        made.append(index if index is None else max(-_FARTHEST, min(index, _FARTHEST)))
    return tuple(made)


def window(given):
    """window= as (left, right), or None."""
    if given is None:
        return None
    if not (isinstance(given, (tuple, list)) and len(given) == 2):
        raise TypeError(f"window is {given!r}; accepted: None, or (left, right), each {_SIDE}")
    made = _sides("window", given, _SIDE)
    if any(side is not None and side < 0 for side in made):
        raise ValueError(f"window is {given!r}; accepted: None, or (left, right), each {_SIDE}")
    return made


def probability(dropout):
    """() or (p,) of dropout="""
    if dropout is None:
        return ()
    if not isinstance(dropout, (tuple, list)) or len(dropout) != 2:
        raise TypeError(f"dropout is {type(dropout).__name__}; accepted: None, (p, key) or (p, state)")
    p = number("dropout's p", dropout[0], "0 to 1")
    if not 0 <= p <= 1:
        raise ValueError(f"dropout's p is {dropout[0]}; accepted: 0 to 1")
    return (p,)


# ---- of jax.nn's signature ----


def alike(query, key, value):
    """The three as arrays that fit together, of 3 or 4 axes each."""
    made = q, k, v = tuple(array(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    if not (q.ndim == k.ndim == v.ndim and q.ndim in (3, 4)):
        raise ValueError(f"query, key and value have {q.ndim}, {k.ndim} and {v.ndim} axes; accepted: 4 each, or 3 each")
    if not (q.dtype == k.dtype == v.dtype and q.dtype.name in _FLOATS):
        raise TypeError(f"query, key and value have dtypes {q.dtype}, {k.dtype} and {v.dtype}; accepted: one of {_ANY_FLOAT}")
    same = q.shape[:-3] == k.shape[:-3] and q.shape[-1] == k.shape[-1] and k.shape[:-1] == v.shape[:-1]
    if not same or k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]:
        raise ValueError(
            f"query, key and value have shapes {q.shape}, {k.shape} and {v.shape}; accepted: (B, T, N, H), (B, S, K, H) and "
            "(B, S, K, any) with or without B, where K divides N"
        )
    return made


def local_window(given):
    """local_window_size= as (left, right), ints of any sign or None, or None."""
    accepted = "None, an int, or (left, right), each an int or None"
    if given is None:
        return None
    pair = isinstance(given, (tuple, list))
    if pair and len(given) != 2:
        raise TypeError(f"local_window_size is {given!r}; accepted: {accepted}")
    return _sides("local_window_size", given if pair else (given, given), accepted)


def mask(given, shape):
    """A mask with the four axes of (B, N, T, S), each of that extent or of 1."""
    made = array("mask", given)
    if made.dtype != jnp.bool_:
        raise TypeError(f"mask has dtype {made.dtype.name}; accepted: {OPERANDS['mask'].dtypes}")
    if made.ndim > 4 or any(n not in (1, extent) for n, extent in zip(made.shape[::-1], shape[::-1])):
        raise ValueError(f"mask has shape {made.shape}; accepted: what broadcasts to (B, N, T, S), here {shape}")
    return made.reshape((1,) * (4 - made.ndim) + made.shape)


def lengths(name, given, batch):
    made = array(name, given)
    if made.shape != (batch,) or made.dtype != jnp.int32:
        raise ValueError(f"{name} has shape {made.shape} and dtype {made.dtype}; accepted: ({batch},), int32")
    return made
