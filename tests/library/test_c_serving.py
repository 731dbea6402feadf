"""The C interface's sequences, caches, mask of dropout and faults: the same bits as from Python, and what it refuses."""

import random

import numpy as np
import pytest

import fa_ext
from bench.problems.case import Case
from bench.problems.placement import BFLOAT16
from bench.problems.serving_cases import append_call, grid, lengths, random_cases
from tests.contract import lse_views
from tests.library.support import c_interface
from tests.library.support.c_interface import APPEND, BACKWARD, FORWARD, array_of, compiled

pytestmark = [pytest.mark.native, pytest.mark.skipif(c_interface.missing_compiler() is not None, reason=str(c_interface.missing_compiler()))]

OK, EVALUE, ETYPE, EBUFFER, EMEMORY, EUNSUPPORTED, ECUDA = range(7)
OPTIONS = ("causal", "scale", "window", "softcap", "max_seqlen_q", "layout")
NEVER = 1


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    return c_interface.Client(compiled(tmp_path_factory.mktemp("client"), "c"))


@pytest.fixture(autouse=True)
def no_faults_before():
    fa_ext.faults(None)


def arrays_of(names, given):
    given = dict(given)
    begin, end = given.pop("k_range", None) or (None, None)
    cos, sin = given.pop("rotary", None) or (None, None)
    q_ids, k_ids = given.pop("segments", None) or (None, None)
    given |= {"k_range_begin": begin, "k_range_end": end, "rotary_cos": cos, "rotary_sin": sin, "q_segments": q_ids, "k_segments": k_ids}
    return [None if given.get(name) is None else array_of(given[name]) for name in names]


def attend(client, arguments, *, check=0, lse=None, **run):
    """(code, out, lse) of a call through the table."""
    q, v = arguments["q"], arguments["v"]
    wide = np.float64 if q.dtype == np.float64 else np.float32
    rows = q.shape[1::-1] if q.ndim == 3 else (q.shape[0], *(q.shape[1:3] if arguments["layout"] == "bhsd" else q.shape[2:0:-1]))
    out = np.full((*q.shape[:-1], v.shape[-1]), np.nan, q.dtype)
    lse = np.full(rows, np.nan, wide) if lse is None else lse
    given = arguments | {"out": out, "lse": lse}
    options = {name: arguments[name] for name in OPTIONS if name in arguments}
    return client.call("forward", arrays_of(FORWARD, given), extra=check, options=options, **run), out, lse


def usable(cases):
    return [case for case in cases if case.dtype != "bfloat16" or BFLOAT16 is not None]


CASES = [*random.Random(3).sample(grid(), 30), *random.Random(4).sample(lengths(), 12), *random_cases(30, seed=77)]


@pytest.mark.parametrize("case", usable(CASES), ids=str)
def test_attention_over_sequences_has_the_bits_of_python(client, case):
    arguments = case.host_inputs()
    wanted = fa_ext.attention(**arguments, return_lse=True)
    code, *got = attend(client, arguments)
    assert code == OK, client.said()
    for x, y in zip(got, wanted):
        assert x.tobytes() == y.tobytes()
    for kind in ("swapped", "step"):
        view, memory = lse_views.poisoned(wanted[1].shape, wanted[1].dtype, kind)
        assert attend(client, arguments, lse=view)[0] == OK, client.said()
        assert memory.tobytes() == lse_views.with_only(wanted[1], kind)


def test_a_promise_of_the_longest_sequence(client):
    """It counts where its bit says so, 0 too, and a backward call has none."""
    case = Case.sequences((2, 3, 1), (4, 5, 6), k="packed", slack=0)
    arguments = case.host_inputs()
    _, *wanted = attend(client, arguments)
    for most in (3, 2**63 - 1):
        code, *got = attend(client, arguments | {"max_seqlen_q": most})
        assert code == OK and all(x.tobytes() == y.tobytes() for x, y in zip(got, wanted)), client.said()
    for most in (0, 2):
        code, out, _ = attend(client, arguments | {"max_seqlen_q": most})
        assert code == EVALUE and np.isnan(out).all()
        assert client.said() == (
            f"seqlens_q of sequence {0 if most == 0 else 1} leads to {2 if most == 0 else 3}, which is negative or more than its storage or "
            f"max_seqlen_q has room for ({3 if most == 0 else 1} such in all)"
        )
    code, out, lse = attend(client, arguments | {"max_seqlen_q": 2}, check=NEVER)
    assert code == OK and not out[4].any() and (lse[:, 4] == -np.inf).all() and out[5].tobytes() == wanted[0][5].tobytes()
    assert client.faults() == [("length", 1, 1, 0, 3)]
    assert attend(client, arguments | {"max_seqlen_q": -1})[0] == EVALUE and client.said() == "max_seqlen_q is -1; accepted: an int >= 0"
    padded = Case.sequences(q="padded", k="padded").host_inputs()
    assert attend(client, padded | {"max_seqlen_q": 3})[0] == EVALUE and "max_seqlen_q is 3, but q has shape" in client.said()
    given, wrt = gradients_of(case)
    given |= {f"d{name}": np.full_like(given[name], np.nan) for name in wrt}
    options = {"layout": "bshd", "max_seqlen_q": 3}
    assert client.call("backward", arrays_of(BACKWARD, given), options=options) == EVALUE
    assert client.said() == "options.max_seqlen_q is given to a backward call; accepted: in forward calls alone"


def gradients_of(case):
    """(arguments of attention_backward but the gradients, which names have one)."""
    arguments = case.host_inputs()
    rng = np.random.default_rng(case.seed)
    out, lse = fa_ext.attention(**arguments, return_lse=True)
    dout = rng.standard_normal(out.shape).astype(out.dtype)
    found = {"dout": dout, "out": out, "lse": lse, "dlse": rng.standard_normal(lse.shape).astype(lse.dtype)}
    return arguments | found, ("q", "k", "v", "sinks")[: 3 + ("sinks" in arguments)]


UNPAGED = [case for case in CASES if case.storage.k != "paged"]


@pytest.mark.parametrize("case", usable(UNPAGED), ids=str)
def test_gradients_of_sequences_have_the_bits_of_python(client, case):
    arguments, wrt = gradients_of(case)
    wanted = fa_ext.attention_backward(**arguments, wrt=wrt)
    given = arguments | {f"d{name}": np.full_like(x, np.nan) for name, x in zip(wrt, wanted)}
    options = {name: arguments[name] for name in OPTIONS if name in arguments}
    assert client.call("backward", arrays_of(BACKWARD, given), options=options) == OK, client.said()
    for name, x in zip(wrt, wanted):
        assert given[f"d{name}"].tobytes() == x.tobytes(), name


def test_gradients_check_index_arrays(client):
    arguments, wrt = gradients_of(Case.sequences((2, 3), (4, 5), k="packed", slack=0))
    given = arguments | {f"d{name}": np.full_like(arguments[name], np.nan) for name in wrt}
    given["seqlens_k"] = np.array([4, 6], np.int32)
    options = {name: given[name] for name in OPTIONS if name in given}
    assert client.call("backward", arrays_of(BACKWARD, given), options=options) == EVALUE
    assert "seqlens_k" in client.said() and " 6" in client.said()
    assert all(np.isnan(given[f"d{name}"]).all() for name in wrt)
    assert client.call("backward", arrays_of(BACKWARD, given), extra=4, options=options) == OK, client.said()
    assert not any(np.isnan(given[f"d{name}"]).any() for name in wrt)
    assert client.faults() == [("length", 1, 1, 1, 6)]


def test_every_field_of_sequences_counts(client):
    """A call without one of the arrays is another call, or none."""
    case = Case.sequences((1, 3, 2), (25, 33, 29), positions="random", causal="bottom_right", alibi="heads", seed=3)
    arguments = case.host_inputs() | {"k_range": (np.array([0, 1, 2], np.int32), np.array([9, 8, 7], np.int32))}
    _, whole, _ = attend(client, arguments)
    for name in ("cu_seqlens_q", "seqlens_k", "page_table", "positions", "k_range", "alibi"):
        code, out, _ = attend(client, {n: x for n, x in arguments.items() if n != name})
        assert code == EVALUE or (code == OK and out.tobytes() != whole.tobytes()), name


def test_workspace_of_sequences_is_asked_without_data(client):
    arguments = Case.sequences().host_inputs()
    given = [None if x is None else x for x in arrays_of(FORWARD, arguments | {"out": np.empty_like(arguments["q"])})]
    options = {"layout": "bshd"}
    with_data = client.call("forward", given, options=options, asks=True)
    for array in filter(None, given):
        array.data = None
    assert client.call("forward", given, options=options, asks=True) == with_data >= 0
    memory = c_interface.aligned(with_data + 1)
    arrays = arrays_of(FORWARD, arguments | {"out": (out := np.empty_like(arguments["q"]))})
    assert client.call("forward", arrays, options=options, workspace=(memory.ctypes.data, with_data)) == OK, client.said()
    assert out.tobytes() == fa_ext.attention(**arguments).tobytes()


@pytest.mark.parametrize("seed", range(12))
def test_append_has_the_bits_of_python(client, seed):
    rng = random.Random(seed)
    q = rng.choice(("packed", "padded", "one"))
    n_q = tuple(rng.randint(0, 1 if q == "one" else 5) for _ in range(4))
    dtype = rng.choice(("float32", "float16", "float64") + (("bfloat16",) if BFLOAT16 is not None else ()))
    case = Case.sequences(n_q, (5, 33, 6, 7), q=q, k=rng.choice(("paged", "padded")), cache=rng.choice(("two", "pair", "swapped")),
                       layout=rng.choice(("bshd", "bhsd")), page_size=rng.choice((1, 3, 16)), dtype=dtype, seed=seed)  # fmt: skip
    interleaved = bool(seed % 2 and seed % 3)
    options = dict(dense=case.storage.k == "padded", rotary=8 * (seed % 3), q=seed % 3 > 0, positions=seed % 3 > 1,
                   interleaved=interleaved, values=seed != 5, seed=seed)  # fmt: skip
    call, mine = (append_call(case, **options) for _ in range(2))
    wanted = fa_ext.append(**call)
    layout = mine.pop("layout")
    mine.pop("interleaved", None)
    if "q" in mine:
        mine["out"] = np.full_like(mine["q"], np.nan)
    code = client.call("append", arrays_of(APPEND, mine), extra=int(interleaved), options={"layout": layout})
    assert code == OK, client.said()
    assert mine["k_cache"].tobytes() == call["k_cache"].tobytes()
    if call["v_cache"] is not None:
        assert mine["v_cache"].tobytes() == call["v_cache"].tobytes()
    if wanted is not None:
        assert mine["out"].tobytes() == wanted.tobytes()
    assert client.call("append", arrays_of(APPEND, mine), options={"layout": layout}, asks=True) == 0


@pytest.fixture
def tokens():
    rng = np.random.default_rng(2)
    k_cache, v_cache = (np.full((3, 4, 2, 8), 7, np.float32) for _ in "kv")
    k, v = (rng.standard_normal((5, 2, 8), np.float32) for _ in "kv")
    return {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "slots": np.array([0, 5, -1, 11, 2], np.int64)}


def test_append_by_slots(client, tokens):
    assert client.call("append", arrays_of(APPEND, tokens), options={"layout": "bshd"}) == OK, client.said()
    for token, slot in enumerate(tokens["slots"]):
        if slot >= 0:
            np.testing.assert_array_equal(tokens["k_cache"][slot // 4, slot % 4], tokens["k"][token])
    assert (tokens["v_cache"][0, 3] == 7).all()


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        ({"k_cache": None}, EVALUE, "k_cache is NULL; accepted: an array"),
        ({"k": None}, EVALUE, "k is NULL; accepted: an array"),
        ({"v": None}, EVALUE, "v is None, but v_cache is not"),
        ({"slots": None}, EVALUE, "seqlens_k and slots are both absent"),
        ({"slots": np.zeros(5, np.float32)}, ETYPE, "slots has dtype float32; accepted: int32, int64"),
        ({"slots": np.full(5, 99, np.int64)}, EVALUE, "slots[0] is 99, which is beyond the caches (5 such in all)"),
        ({"rotary_cos": np.zeros((9, 4), np.float32)}, EVALUE, "rotary_sin is NULL, but rotary_cos is not"),
        ({"q": np.zeros((5, 4, 8), np.float32)}, EVALUE, "out is NULL; accepted: an array"),
        ({"out": np.zeros((5, 4, 8), np.float32)}, EVALUE, "out is given, but q, which goes there, is not"),
    ],
    ids=str,
)
def test_append_refuses(client, tokens, change, code, text):
    before = tokens["k_cache"].copy(), tokens["v_cache"].copy()
    given = tokens | change
    arrays = [None if given.get(name) is None else array_of(given[name]) for name in APPEND]
    assert client.call("append", arrays, options={"layout": "bshd"}) == code
    assert text in client.said()
    assert all((x == y).all() for x, y in zip((tokens["k_cache"], tokens["v_cache"]), before))


def test_segments(client):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, heads, rows, 8), np.float32) for heads, rows in ((4, 5), (2, 7), (2, 7)))
    ids = tuple(rng.integers(0, 3, (2, rows)).astype(np.int32) for rows in (5, 7))
    given = {"q": q, "k": k, "v": v, "segments": ids, "layout": "bhsd", "causal": "bottom_right"}
    code, out, lse = attend(client, given)
    assert code == OK, client.said()
    wanted, wanted_lse = fa_ext.attention(**given, return_lse=True)
    assert out.tobytes() == wanted.tobytes() and lse.tobytes() == wanted_lse.tobytes()
    gradients = {f"d{name}": np.full_like(x, np.nan) for name, x in (("q", q), ("k", k), ("v", v))}
    options = {name: given[name] for name in OPTIONS if name in given}
    assert client.call("backward", arrays_of(BACKWARD, given | gradients | {"dout": out, "out": out, "lse": lse}), options=options) == OK, client.said()
    for found, made in zip(gradients.values(), fa_ext.attention_backward(out, q, k, v, out, lse, segments=ids, **options), strict=True):
        assert found.tobytes() == made.tobytes()
    arrays = arrays_of(FORWARD, given | {"out": out})
    arrays[FORWARD.index("k_segments")] = None
    assert client.call("forward", arrays) == EVALUE and "segments' k_ids is absent, but q_ids is given" in client.said()


@pytest.mark.parametrize("shape", [(2, 4, 5, 2), (1, 1, 5, 2, 2)])
def test_intervals(client, shape):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, heads, rows, 8), np.float32) for heads, rows in ((4, 5), (2, 7), (2, 7)))
    intervals = rng.integers(-1, 9, shape).astype(np.int32)
    given = {"q": q, "k": k, "v": v, "intervals": intervals, "layout": "bhsd", "causal": "bottom_right"}
    code, out, lse = attend(client, given)
    assert code == OK, client.said()
    wanted, wanted_lse = fa_ext.attention(**given, return_lse=True)
    assert out.tobytes() == wanted.tobytes() and lse.tobytes() == wanted_lse.tobytes()
    gradients = {f"d{name}": np.full_like(x, np.nan) for name, x in (("q", q), ("k", k), ("v", v))}
    options = {name: given[name] for name in OPTIONS if name in given}
    assert client.call("backward", arrays_of(BACKWARD, given | gradients | {"dout": out, "out": out, "lse": lse}), options=options) == OK, client.said()
    for found, made in zip(gradients.values(), fa_ext.attention_backward(out, q, k, v, out, lse, intervals=intervals, **options), strict=True):
        assert found.tobytes() == made.tobytes()
    assert client.call("forward", arrays_of(FORWARD, given | {"out": out, "intervals": intervals[..., :1]})) == EVALUE
    assert "intervals has shape" in client.said()


@pytest.mark.parametrize("shape", [(4,), (2, 4)])
def test_max_logit(client, shape):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, heads, rows, 8), np.float32) for heads, rows in ((4, 5), (2, 7), (2, 7)))
    given = {"q": q, "k": k, "v": v, "layout": "bhsd", "causal": "bottom_right"}
    found, made = np.full(shape, -np.inf, np.float32), np.full(shape, -np.inf, np.float32)
    found[..., 1] = made[..., 1] = 100
    code, out, lse = attend(client, given | {"max_logit": found})
    assert code == OK, client.said()
    wanted, wanted_lse = fa_ext.attention(**given, max_logit=made, return_lse=True)
    assert out.tobytes() == wanted.tobytes() and lse.tobytes() == wanted_lse.tobytes()
    assert found.tobytes() == made.tobytes() and (found[..., 1] == 100).all() and np.isfinite(found).all()
    assert attend(client, given | {"max_logit": found[..., :3]})[0] == EVALUE and "max_logit has shape" in client.said()
    assert attend(client, given | {"max_logit": q[0, :, 0, 0]})[0] == EVALUE and "max_logit overlaps q in memory" in client.said()


@pytest.mark.parametrize("dtype", (np.int32, np.int64))
def test_documents(client, dtype):
    ids = np.array([[3, 3, 1, 1, 1], [1, 1, 3, 2, 2]], dtype)[:, ::-1]
    for count in (5, 8, 20):
        out = np.full(count + 1, -7, np.int32)
        assert client.call("documents", [array_of(ids), array_of(out)]) == OK, client.said()
        np.testing.assert_array_equal(out, fa_ext.documents(ids, count=count))
        assert client.call("documents", [array_of(ids), array_of(out)], asks=True) == 0


def test_documents_refuses(client):
    ids, out = np.arange(5), np.full(4, -7, np.int32)
    assert client.call("documents", [array_of(ids), array_of(out)]) == EVALUE
    assert "ids hold 5 documents, but count is 3" in client.said() and (out == -7).all()
    assert client.call("documents", [array_of(ids), array_of(out)], extra=NEVER) == OK, client.said()
    assert out.tolist() == [0, 1, 2, 3] and client.faults() == [("documents", 1, -1, 3, 5)]
    for arrays, words in (([None, array_of(out)], "ids is NULL"), ([array_of(ids), None], "out is NULL")):
        assert client.call("documents", arrays) == EVALUE and words in client.said()
    assert client.call("documents", [array_of(ids.astype("f4")), array_of(out)]) == ETYPE
    assert "ids has dtype float32; accepted: int32, int64" in client.said()


def test_faults_are_those_of_python(client, tokens):
    """One count for both interfaces."""
    bad = tokens | {"slots": np.array([0, 99, 77, 1, 2], np.int64)}
    assert client.call("append", arrays_of(APPEND, bad), extra=2, options={"layout": "bshd"}) == OK, client.said()
    fa_ext.append(**bad, layout="bshd", check=False)
    arguments = Case.sequences().host_inputs()
    arguments["seqlens_k"][1] = -5
    assert attend(client, arguments)[0] == EVALUE
    code, out, lse = attend(client, arguments, check=NEVER)
    assert code == OK, client.said()
    assert out.tobytes() == fa_ext.attention(**arguments, check=False).tobytes()
    met = [("length", 2, 1, 1, -5), ("slot", 4, -1, 1, 99)]
    assert client.faults(keep=True) == met == fa_ext.faults(None, clear=False)
    assert client.faults() == met and client.faults() == [] == fa_ext.faults(None)


def test_faults_of_a_device(client):
    if fa_ext._core.build_info()["cuda"]:
        pytest.skip("the build has CUDA")
    assert client.faults(device=1) == ECUDA and "has no CUDA kernels" in client.said()
    assert client.faults(device=-1) == EVALUE and client.said().startswith("device is -1")


@pytest.mark.parametrize("value", [-1, 3])
def test_check_is_one_of_its_values(client, value):
    assert attend(client, Case.sequences().host_inputs(), check=value)[0] == EVALUE
    assert client.said() == f"check is {value}; accepted: FA_EXT_CHECK_DEFAULT, FA_EXT_CHECK_NEVER or FA_EXT_CHECK_ALWAYS"


@pytest.mark.parametrize("dropout", [(0.0, 1), (1.0, 1), (0.3, 2**64 - 1), (0.5, 99, 2**32 - 1), (0.7, 5, 1, (3, 2, 1000, 77), 9)])
@pytest.mark.parametrize("shape", [(2, 3, 5, 33), (1, 1, 1, 1), (0, 2, 3, 4), (1, 2, 113, 239)])
def test_dropout_keep_has_the_bits_of_python(client, dropout, shape):
    wanted = fa_ext.dropout_keep(*shape, dropout)
    out = np.full((*shape[:3], 2 * shape[3]), 7, np.uint8)
    assert client.dropout_keep(array_of(out.view(bool)[..., ::2]), dropout=dropout) == OK, client.said()
    np.testing.assert_array_equal(out[..., ::2], wanted.astype(np.uint8))
    assert (out[..., 1::2] == 7).all()


def test_dropout_keep_refuses(client):
    out = np.zeros((1, 2, 3, 4), bool)
    assert client.dropout_keep(None) == EVALUE and client.said() == "out is NULL; accepted: an array"
    assert client.dropout_keep(array_of(out[0])) == EVALUE and "out has shape (2, 3, 4)" in client.said()
    assert client.dropout_keep(array_of(out.astype(np.float32))) == ETYPE
    assert client.dropout_keep(array_of(np.broadcast_to(out[:1], (2, 2, 3, 4)))) == EVALUE
    assert client.dropout_keep(array_of(out), dropout=(1.5, 0)) == EVALUE and "options.dropout is 1.5" in client.said()
    assert client.dropout_keep(array_of(out), dropout=(0.5, 0, 0, (0, 0, 0, 0), 1)) == EVALUE
    assert client.said().startswith("dropout's heads is 1")
    away = array_of(out)
    away.device = 1
    assert client.dropout_keep(away) == EUNSUPPORTED and "out is on CUDA device 0" in client.said()
