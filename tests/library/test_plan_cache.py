"""A thread's memory of its last calls: calls over sequences and caches that differ in one thing from the one before, against the
same call on a thread that has kept nothing; and calls from C, where arrays for every result are given."""

import threading

import numpy as np
import pytest

import fa_ext
from tests.library.support import c_interface
from tests.library.support.c_interface import BACKWARD, FORWARD, array_of, compiled

pytestmark = pytest.mark.native

BATCH, HEADS, ROWS, DIM, KEYS = 3, 4, 4, 8, 16  # ROWS are a page's too, so that both layouts have one shape
POISON = 7777.0

#: Choices by which calls over sequences differ: the first of each is the usual one.
ATTENTION = {
    "place": (0, 1, 2),
    "values": (0, 1),
    "contents": (0, 1, 2, 3),
    "bad": (None, "seqlens_k", "page_table", "cu_seqlens_q"),
    "q": ("packed", "one", "padded"),
    "k": ("paged", "padded", "packed"),
    "page_size": (4, 2, 8),
    "lengths": (True, False),
    "lengths_q": (False, True),
    "max_seqlen_q": (None, 4, 1, 0),
    "index_dtype": ("int32", "int64"),
    "index_offset": (0, 1),
    "k_range": (None, "begin", "end", "both"),
    "positions": (False, True),
    "check": (None, False, True),
    "layout": ("bshd", "bhsd"),
    "causal": (False, "bottom_right", "top_left"),
    "window": (None, (3, None)),
    "batch_invariant": (False, True),
    "extra": (None, "sinks", "alibi", "bias", "mask"),
    "into": ("out", None, "pair"),
    "kernel": (None, "cpu_ref"),
}

#: The same of append().
APPEND = {
    "place": (0, 1, 2),
    "values": (0, 1),
    "contents": (0, 1, 2, 3),
    "bad": (None, "seqlens_k", "page_table", "slots"),
    "k": ("one", "packed", "padded"),
    "cache": ("paged", "dense", "slots"),
    "page_size": (4, 2, 8),
    "lengths_q": (False, True),
    "slots_dtype": ("int64", "int32"),
    "check": (None, False, True),
    "layout": ("bshd", "bhsd"),
    "v": (True, False),
    "q": ("out", None, "new", "itself"),
    "rotary": (4, 2),
    "interleaved": (False, True),
    "positions": (False, True),
}


class Memory:
    """Arrays by name and place. Each begins at a multiple of 4096 bytes, so that alignment alone does not tell them apart; the same
    name and place is the same memory, whatever was there before."""

    def __init__(self):
        self.held = {}

    def array(self, name, place, shape, dtype="float32", offset=0):
        size = 1 << 14
        if (name, place) not in self.held:
            raw = np.zeros(size + 4096, np.uint8)
            self.held[name, place] = raw[-raw.ctypes.data % 4096 :][:size]
        count = int(np.prod(shape))
        return self.held[name, place].view(dtype)[offset : offset + count].reshape(shape)

    def filled(self, name, place, values, shape, dtype="float32", offset=0):
        made = self.array(name, place, shape, dtype, offset)
        made[...] = values
        return made


def alone(call):
    """The result of `call` on a new thread."""
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def outcome(call, *written):
    """The result of a call, as bytes, or its error; what it leaves in `written`; the faults that it counted on the host."""
    fa_ext.faults(None)
    for x in written:
        x[...] = POISON
    try:
        got = call()
    except (ValueError, TypeError) as error:
        return type(error), str(error)
    left = [*(got if isinstance(got, tuple) else (got,)), *written]
    return [None if x is None else fa_ext.to_numpy(x).tobytes() for x in left], fa_ext.faults(None)


def head_rows(layout, batch, heads, rows):
    return (batch, rows, heads, DIM) if layout == "bshd" else (batch, heads, rows, DIM)


def index_arrays(c, memory, random):
    """By name, each in the memory of its name and place, where an earlier call's contents were."""
    lengths_q = random.integers(0, 4, BATCH)
    starts = [0, *np.cumsum(lengths_q)]
    keys_of = random.integers(4, KEYS + 1, BATCH)
    pages = KEYS // c["page_size"]
    contents = {
        "cu_seqlens_q": starts,
        "seqlens_q": np.minimum(lengths_q, 1) if "one" in (c.get("q"), c["k"]) else lengths_q,
        "cu_seqlens_k": [0, *np.sort(random.integers(0, KEYS, BATCH))],
        "seqlens_k": keys_of,
        "page_table": random.permutation(BATCH * pages).reshape(BATCH, pages),
        "begin": random.integers(0, 3, BATCH),
        "end": random.integers(8, 16, BATCH),
        "slots": random.permutation(BATCH * KEYS)[:BATCH],
    }
    bad = {"seqlens_k": [-1, KEYS + 1, 1], "page_table": np.full((BATCH, pages), 999), "cu_seqlens_q": [0, 5, 2, 9], "slots": [999] * BATCH}
    if c["bad"]:
        contents[c["bad"]] = bad[c["bad"]]
    dtypes = {name: c.get("index_dtype", "int32") for name in contents} | {"slots": c.get("slots_dtype", "int64")}
    return {
        name: memory.filled(name, c["place"], x, np.shape(x), dtypes[name], c.get("index_offset", 0)) for name, x in contents.items()
    }


def values_of(c, memory, name, shape):
    return memory.filled(name, c["place"], np.random.default_rng([c["values"], ord(name[0])]).standard_normal(shape), shape)


def rows_shape(kind, layout):
    """Of queries or new tokens."""
    return {"packed": (BATCH * 4, HEADS, DIM), "one": (BATCH, HEADS, DIM), "padded": head_rows(layout, BATCH, HEADS, ROWS)}[kind]


def attention_call(c, memory):
    random = np.random.default_rng(c["contents"])
    index = index_arrays(c, memory, random)
    layout, size = c["layout"], c["page_size"]
    q = values_of(c, memory, "q", rows_shape(c["q"], layout))
    shape = {
        "paged": head_rows(layout, BATCH * KEYS // size, HEADS, size),
        "padded": head_rows(layout, BATCH, HEADS, KEYS),
        "packed": (KEYS, HEADS, DIM),
    }[c["k"]]
    given = {"q": q, "k": values_of(c, memory, "k", shape), "v": values_of(c, memory, "v", shape)}
    options = {name: c.get(name) for name in ("check", "layout", "causal", "window", "batch_invariant", "kernel")}
    options["cu_seqlens_q"] = index["cu_seqlens_q"] if c["q"] == "packed" else None
    options["cu_seqlens_k"] = index["cu_seqlens_k"] if c["k"] == "packed" else None
    options["page_table"] = index["page_table"] if c["k"] == "paged" else None
    options["max_seqlen_q"] = c["max_seqlen_q"] if c["q"] == "packed" else None
    if c["lengths"] or c["k"] == "paged":
        options["seqlens_k"] = index["seqlens_k"]
    if c["lengths_q"]:
        options["seqlens_q"] = index["seqlens_q"]
    if c["k_range"]:
        options["k_range"] = tuple(index[side] if c["k_range"] in (side, "both") else None for side in ("begin", "end"))
    if c["positions"]:
        shape = q.shape[:1] if q.ndim == 3 else (BATCH, ROWS)
        options["positions"] = memory.filled("positions", c["place"], random.integers(0, KEYS, shape), shape, "int32")
    if c["extra"] in ("sinks", "alibi"):
        options[c["extra"]] = values_of(c, memory, c["extra"], (HEADS,))
    elif c["extra"] and q.ndim == 4:
        plane = values_of(c, memory, c["extra"], (ROWS, KEYS))
        options[c["extra"]] = plane if c["extra"] == "bias" else memory.filled("mask", c["place"], plane > 0, plane.shape, "bool")
    return given | options


def check_attention(c, memory, move=lambda x: x):
    call = attention_call(c, memory)
    written = ()
    if c["into"]:
        out, q = memory.array("out", c["place"], call["q"].shape), call["q"]
        rows = q.shape[1::-1] if q.ndim == 3 else (BATCH, HEADS, ROWS)
        written = (out, memory.array("lse", c["place"], rows))[: 1 + (c["into"] == "pair")]
        written = tuple(map(move, written))
        call["out"] = written if c["into"] == "pair" else written[0]
    call = {name: move(x) for name, x in call.items() if name != "out"} | {"out": call.get("out")}
    ours = outcome(lambda: fa_ext.attention(**call), *written)
    assert ours == alone(lambda: outcome(lambda: fa_ext.attention(**call), *written)), c


def append_call(c, memory):
    random = np.random.default_rng(c["contents"])
    index = index_arrays(c, memory, random)
    layout, size = c["layout"], c["page_size"]
    kind = "one" if c["cache"] == "slots" else c["k"]
    shape = rows_shape(kind, layout)
    cache = head_rows(layout, BATCH, HEADS, KEYS) if c["cache"] == "dense" else head_rows(layout, BATCH * KEYS // size, HEADS, size)
    call = {"k_cache": memory.array("k_cache", c["place"], cache), "v_cache": None, "k": values_of(c, memory, "k", shape), "v": None}
    if c["v"]:
        call |= {"v_cache": memory.array("v_cache", c["place"], cache), "v": values_of(c, memory, "v", shape)}
    if c["cache"] == "slots":
        call["slots"] = index["slots"]
    else:
        call["seqlens_k"] = index["seqlens_k"]
        call["page_table"] = index["page_table"] if c["cache"] == "paged" else None
        call["cu_seqlens_q"] = index["cu_seqlens_q"] if kind == "packed" else None
        call["seqlens_q"] = index["seqlens_q"] if c["lengths_q"] else None
    if c["q"]:
        call["rotary"] = tuple(values_of(c, memory, name, (KEYS, c["rotary"])) for name in ("cos", "sin"))
        call["interleaved"] = c["interleaved"]
        call["q"] = values_of(c, memory, "q", shape)
        if c["positions"] or c["cache"] == "slots":
            positions = shape[:1] if len(shape) == 3 else (BATCH, ROWS)
            call["positions"] = memory.filled("positions", c["place"], random.integers(0, KEYS, positions), positions, "int32")
        if c["q"] != "new":
            call["out"] = call["q"] if c["q"] == "itself" else memory.array("out", c["place"], shape)
    return call | {"layout": layout, "check": c["check"]}


def check_append(c, memory, move=lambda x: x):
    call = {name: move(x) for name, x in append_call(c, memory).items()}
    if c["q"] == "itself":
        call["out"] = call["q"]
    written = [call[name] for name in ("k_cache", "v_cache") if call[name] is not None]
    queries = fa_ext.to_numpy(call["q"]).copy() if c["q"] else None

    def run():
        if c["q"]:
            call["q"][...] = move(queries)
        return fa_ext.append(**call)

    ours = outcome(run, *written)
    assert ours == alone(lambda: outcome(run, *written)), c


def walk(choices, check, calls, move=lambda x: x):
    random, memory = np.random.default_rng(1), Memory()
    now = {name: values[0] for name, values in choices.items()}
    names = list(choices)
    for _ in range(calls):
        name = names[random.integers(len(names))]
        before, now = now, now | {name: choices[name][random.integers(len(choices[name]))]}
        check(now, memory, move)
        moved = {"place": (now["place"] + 1) % 3, "contents": (now["contents"] + 1) % 4, "values": 1 - now["values"]}
        for again in (now | moved, before, now):
            check(again, memory, move)
        if random.random() < 0.2:
            now = {name: values[0] for name, values in choices.items()}


def test_calls_over_sequences_in_random_order():
    walk(ATTENTION, check_attention, 400)


def test_appends_in_random_order():
    walk(APPEND, check_append, 400)


@pytest.mark.gpu
@pytest.mark.parametrize(("choices", "check"), [(ATTENTION, check_attention), (APPEND, check_append)], ids=["attention", "append"])
def test_calls_on_a_device_in_random_order(choices, check):
    torch = pytest.importorskip("torch")

    def move(x):
        if isinstance(x, tuple):
            return tuple(map(move, x))
        return torch.from_numpy(x).cuda() if isinstance(x, np.ndarray) else x

    walk({name: values for name, values in choices.items() if name != "kernel"}, check, 250, move)


@pytest.mark.parametrize(("choices", "check"), [(ATTENTION, check_attention), (APPEND, check_append)], ids=["attention", "append"])
@pytest.mark.parametrize("plain", [{}, {"q": "padded", "k": "padded"}, {"k": "packed", "cache": "dense"}], ids=str)
def test_each_value_after_each(choices, check, plain):
    """Not every value is followed by every other one in a walk."""
    usual, memory = {name: values[0] for name, values in choices.items()}, Memory()
    usual |= {name: value for name, value in plain.items() if value in choices.get(name, ())}
    for name, values in choices.items():
        for before in values:
            for after in values:
                for value in (before, after):
                    check(usual | {name: value}, memory)


def test_sequences_and_dense_calls_over_the_same_arrays():
    """Index arrays come and go while q, k, v and out stay."""
    random = np.random.default_rng(0)
    q, k, v, out = (random.standard_normal((2, 4, 8, 16)).astype("float32") for _ in range(4))
    lengths = np.array([3, 5], np.int32)
    dense, short = (fa_ext.attention(q, k, v, seqlens_k=x, layout="bhsd") for x in (None, lengths))
    assert dense.tobytes() != short.tobytes()
    for given, wanted in ((None, dense), (lengths, short)) * 3:
        assert fa_ext.attention(q, k, v, seqlens_k=given, layout="bhsd", out=out).tobytes() == wanted.tobytes()


def test_a_call_that_was_fine_is_checked_again():
    """The same arrays with other contents: what check= finds is found each time."""
    memory = Memory()
    usual = {name: values[0] for name, values in ATTENTION.items()}
    for _ in range(2):
        check_attention(usual, memory)
    call = attention_call(usual, memory)
    table = call["page_table"].copy()
    call["seqlens_k"][:] = KEYS
    for page in (0, 10**6, -1, 1):
        call["page_table"][:] = table
        call["page_table"][1, 2] = page
        if 0 <= page < BATCH * KEYS:
            fa_ext.attention(**call)
            continue
        with pytest.raises(ValueError, match=rf"page_table\[1, 2\] is {page}, which is no page"):
            fa_ext.attention(**call)
        fa_ext.attention(**call | {"check": False})
        assert [fault[0] for fault in fa_ext.faults(None)] == ["page"]


def test_states_of_dropout_on_the_host_are_read_each_time():
    random = np.random.default_rng(0)
    q, k, v, out = (random.standard_normal((1, 2, 16, 8)).astype("float32") for _ in range(4))
    state = np.array([1, 0, 0, 0, 0, 0, 0, 0], np.uint32)
    made = []
    for seed in (1, 2, 1, 1, 2):
        state[0] = seed
        made.append(fa_ext.attention(q, k, v, dropout=(0.5, state), out=out).tobytes())
    assert made[0] == made[2] == made[3] != made[1] == made[4]


def test_arrays_of_more_axes_are_other_arrays():
    """Extents and strides of the first axes are the same."""
    random = np.random.default_rng(0)
    q, k, v, out = (random.standard_normal((2, 4, 8, 16)).astype("float32") for _ in range(4))
    sinks = np.zeros(4, np.float32)
    for _ in range(2):
        fa_ext.attention(q, k, v, sinks=sinks, out=out)
    with pytest.raises(ValueError, match="sinks has shape"):
        fa_ext.attention(q, k, v, sinks=sinks[:, None], out=out)


def test_written_arrays_that_meet_others_are_refused_after_calls_like_them():
    """Of append(): out may be q itself, and nothing else meets anything."""
    memory = np.zeros(1 << 14, np.float32)
    memory = memory[-memory.ctypes.data // 4 % 1024 :]
    q, k, v, out, elsewhere = (memory[n * 1024 :][:32].reshape(1, 4, 8) for n in range(5))
    caches = [memory[n * 1024 :][:512].reshape(4, 4, 4, 8) for n in (5, 6)]
    index = {"page_table": np.arange(4, dtype=np.int32)[None], "seqlens_k": np.array([7], np.int32)}
    rotary = np.ones((16, 4), np.float32), np.zeros((16, 4), np.float32)

    def call(out, k=k, q=q, caches=caches):
        return fa_ext.append(*caches, k, v, q=q, rotary=rotary, layout="bshd", out=out, **index)

    for given in (out, elsewhere, q, out, q, elsewhere, q):
        call(given)
    shifted = memory[16:][:32].reshape(1, 4, 8)
    with pytest.raises(ValueError, match="out overlaps q in memory"):
        call(shifted)
    call(out)
    for meets, name in ((k, "out overlaps k"), (caches[0][0, 0][None], "k_cache overlaps out")):
        call(out)
        with pytest.raises(ValueError, match=name):
            call(meets)
    call(out)
    with pytest.raises(ValueError, match="k_cache overlaps k in memory"):
        call(out, k=caches[0][0, 0][None])


@pytest.mark.skipif(c_interface.missing_compiler() is not None, reason=str(c_interface.missing_compiler()))
def test_calls_like_the_one_before_take_their_own_arrays(tmp_path):
    client = c_interface.Client(compiled(tmp_path, "c"))
    rng = np.random.default_rng(0)
    shapes = {"rows": (1, 2, 9), **dict.fromkeys(("q", "k", "v", "dout", "out", "dq", "dk", "dv"), (1, 2, 9, 16))}

    def aligned(name):
        x = c_interface.aligned(4 * np.prod(shapes.get(name, shapes["rows"])), 0).view(np.float32)
        x[:] = rng.standard_normal(x.size)
        return x.reshape(shapes.get(name, shapes["rows"]))

    calls = [{name: aligned(name) for name in {*BACKWARD, *FORWARD} & {*shapes, "lse", "dlse"}} for _ in range(3)]
    for operation, names in (("forward", FORWARD), ("backward", BACKWARD)):
        for held in calls:
            arrays = [array_of(held[name]) if name in held else None for name in names]
            assert client.call(operation, arrays, asks=True) >= 0, client.said()  # which plans with addresses that it makes up
            assert client.call(operation, arrays) == 0, client.said()
    for held in calls:
        q, k, v, dout, dlse = (held[name] for name in ("q", "k", "v", "dout", "dlse"))
        out, lse = fa_ext.attention(q, k, v, return_lse=True)
        wanted = out, lse, *fa_ext.attention_backward(dout, q, k, v, out, lse, dlse=dlse)
        for name, x in zip(("out", "lse", "dq", "dk", "dv"), wanted, strict=True):
            assert held[name].tobytes() == x.tobytes(), name
