"""cpu_simd alone: each of its instances on this CPU, its vector functions, and that threads change nothing but time."""

import ctypes
import os
import shutil
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import fa_ext
from bench.problems.case import Case
from bench.problems.dense import ALIBIS
from bench.problems.placement import dtype_of
from fa_ext import _core
from tests.contract import large_logits, runner

KERNEL = "cpu_simd"
pytestmark = pytest.mark.skipif(KERNEL not in fa_ext.kernels(), reason="this build has no cpu_simd")

ISAS = ("amxbf16", "avx512bf16", "avx512", "avx2", "generic")


def apply(isa, function, x):
    """exp2 or tanh of a float32 or float64 array by one instance; skips where this CPU lacks it."""
    library = ctypes.CDLL(_core.__file__)
    call = library.fa_cpu_simd_apply
    call.restype = ctypes.c_bool
    call.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_bool, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    padded = np.zeros((x.size + 15) // 16 * 16, x.dtype)
    padded[: x.size] = x
    y = np.full_like(padded, np.nan)
    if not call(isa.encode(), function.encode(), x.dtype == np.float64, padded.ctypes.data, y.ctypes.data, y.size):
        pytest.skip(f"this CPU has no {isa}")
    return y[: x.size]


@pytest.fixture
def force():
    """force(isa): calls take that instance; skips where this CPU lacks it."""
    call = ctypes.CDLL(_core.__file__).fa_cpu_simd_force
    call.restype, call.argtypes = None, [ctypes.c_char_p]

    def chosen(isa):
        apply(isa, "exp2", np.zeros(1, np.float32))
        call(isa.encode())

    yield chosen
    call((os.environ.get("FA_EXT_CPU_ISA") or "").encode())


# ---- the vector functions ----


def ulps(got, want):
    """Error of normal results in units of the last place of their dtype; ``want`` is more precise."""
    digits = np.finfo(got.dtype).nmant + 1
    _, exponent = np.frexp(want)
    return np.abs(got - want) / np.ldexp(np.ones((), want.dtype), exponent - digits)


def every_nth_float(low, high, n):
    """Each n-th float32 of [low, high], through all exponents of both signs."""
    bits = np.arange(0, 1 << 32, n, dtype=np.uint64).astype(np.uint32)
    values = bits.view(np.float32)
    return values[(values >= low) & (values <= high)]


@pytest.mark.parametrize("isa", ISAS)
def test_exp2_of_floats(isa):
    # All 3.3e9 arguments of [-126, 127] were tried once: 0.85 ulp with fused multiply-add, 1.13 without.
    x = every_nth_float(-126, 127, 1499)
    error = ulps(apply(isa, "exp2", x), np.exp2(x.astype(np.float64)))
    assert x.size > 1e6 and error.max() < (1.2 if isa == "generic" else 0.9), (error.max(), x[error.argmax()])


@pytest.mark.parametrize("isa", ISAS)
def test_exp2_of_doubles(isa):
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.uniform(-1022, 0, 50_000), rng.uniform(-1, 1, 50_000), np.ldexp(rng.uniform(-1, 1, 9000), -40)])  # fmt: skip
    error = ulps(apply(isa, "exp2", x), np.exp2(x.astype(np.longdouble)))
    assert error.max() < 1.2, (error.max(), x[error.argmax()])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exp2_at_its_edges(isa, dtype):
    tiny = np.finfo(dtype).smallest_normal
    lowest = np.log2(tiny)
    whole = np.arange(int(lowest), 128)
    x = np.array([-np.inf, np.nan, np.finfo(dtype).min, -0.0, *whole], dtype)
    y = apply(isa, "exp2", x)
    assert y[0] == 0 and np.isnan(y[1]) and y[2] == 0 and y[3] == 1
    np.testing.assert_array_equal(y[4:], np.ldexp(dtype(1), whole))  # exact, 2^0 above all
    below = np.linspace(lowest - 60, lowest, 10_001, dtype=dtype)
    y = apply(isa, "exp2", below)
    assert (y >= 0).all() and (np.abs(y - np.exp2(below)) <= tiny).all()  # underflow: gradual or to zero


@pytest.mark.parametrize("isa", ISAS)
def test_tanh(isa):
    x = every_nth_float(-1e30, 1e30, 1499)
    normal = np.abs(x) > np.finfo(np.float32).smallest_normal * 4
    error = ulps(apply(isa, "tanh", x), np.tanh(x.astype(np.float64)))[normal]
    assert error.max() < 4
    x = np.random.default_rng(0).uniform(-20, 20, 50_000)
    assert ulps(apply(isa, "tanh", x), np.tanh(x.astype(np.longdouble))).max() < 4
    for dtype in (np.float32, np.float64):
        edge = np.array([np.inf, -np.inf, np.nan, 0, 30, -30], dtype)
        np.testing.assert_array_equal(apply(isa, "tanh", edge), np.array([1, -1, np.nan, 0, 1, -1], dtype))


# ---- every instance against float64 ----

INSTANCE_CASES = [
    Case(1, 2, 2, 70, 230, 64, dtype="float32", causal="bottom_right"),
    Case(2, 6, 2, 33, 100, 80, 48, dtype="float16", bias="full", mask="rows", sinks="same"),
    Case(1, 4, 1, 19, 300, 13, 7, dtype="bfloat16", softcap=2.0, window=(40, 3), strides="mixed"),
    Case(1, 2, 2, 129, 97, 256, dtype="float64", mask="full", softcap=30.0, layout="bshd"),
    Case(1, 3, 3, 65, 193, 1, 256, dtype="float32", bias="holes", scale=-0.4),
    Case(1, 8, 2, 1, 500, 128, dtype="bfloat16", sinks="float32"),
    Case(1, 2, 2, 64, 96, 64, dtype="float32", values="large", scale=0.0),
]


@pytest.mark.parametrize("case", INSTANCE_CASES, ids=str)
@pytest.mark.parametrize("isa", ISAS)
def test_instance(isa, case, force):
    force(isa)
    report = runner.verdict(KERNEL, case)
    assert report, str(report)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rise", [0.01, 0.17, 0.35, 2.0])
def test_maxima_that_grow_from_tile_to_tile(isa, rise, force):
    """By less and by more than what an instance lets pass, 5.5, in a tile of its keys."""
    force(isa)
    rng = np.random.default_rng(12)
    bfloat16 = dtype_of("bfloat16")
    q, k, v = (rng.standard_normal((1, 2, n, 32), dtype=np.float32).astype(bfloat16) for n in (70, 700, 700))
    bias = (rise * np.arange(700, dtype=np.float32))[None, None, None, :]
    for options in ({}, {"sinks": np.array([-40.0, 200.0], np.float32)}, {"causal": "bottom_right", "dropout": (0.3, 5)}):
        report = fa_ext.verify(q, k, v, bias=bias, **options, kernel=KERNEL)
        assert report, str(report)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("head_dim", [13, *large_logits.HEAD_DIMS])
def test_large_scores(isa, head_dim, force):
    force(isa)
    for amplitude in large_logits.AMPLITUDES:
        counted = large_logits.count([KERNEL], range(6), head_dim, amplitude)[KERNEL]
        assert counted.seeds == 6 and not counted.over and counted.worst < 0.6, (amplitude, counted)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("poison", ["k", "v"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_is_safe_from_nan_in_keys_that_it_does_not_see(isa, dtype, poison, force):
    force(isa)
    rng = np.random.default_rng(5)
    inputs = {name: rng.standard_normal((1, 2, 50, 24), dtype=np.float32).astype(dtype_of(dtype)) for name in "qkv"}
    clean = fa_ext.attention(**inputs, causal=True, kernel=KERNEL)
    inputs[poison][:, :, 30] = [np.nan, np.inf] * 12
    out = fa_ext.attention(**inputs, causal=True, kernel=KERNEL)
    np.testing.assert_array_equal(runner.bits(out[:, :, :30]), runner.bits(clean[:, :, :30]))
    assert np.isnan(out[:, :, 30:].astype(np.float32)).any(-1).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_alibi_on_every_instance(isa, dtype, force):
    force(isa)
    for kind in ALIBIS:
        for seq_q, seq_k, d in ((1, 799, 64), (113, 239, 59), (3, 1023, 128)):
            case = Case(2, 4, 2, seq_q, seq_k, d, dtype=dtype, alibi=kind, causal="bottom_right")
            assert (report := runner.verdict(KERNEL, case)), str(report)


# ---- bits ----


def set_threads(count):
    ctypes.CDLL("libgomp.so.1").omp_set_num_threads(count)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "case",
    [
        Case(1, 4, 2, 400, 400, 64, dtype="float32", causal=True),
        Case(3, 5, 5, 130, 210, 40, dtype="bfloat16", mask="full", sinks="same"),
        Case(1, 2, 2, 700, 300, 32, dtype="float64", window=(90, 10)),
    ],
    ids=str,
)
def test_threads_change_no_bit(isa, case, force):
    force(isa)
    threads = ctypes.CDLL("libgomp.so.1").omp_get_max_threads()
    try:
        results = []
        for count in (1, 2, 3, 8):
            set_threads(count)
            results.append([runner.bits(x) for x in runner.run(KERNEL, case)])
    finally:
        set_threads(threads)
    for result in results[1:]:
        for one, other in zip(results[0], result):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("options", [{"causal": "bottom_right"}, {"window": (70, 0)}], ids=str)
@pytest.mark.parametrize(("dtype", "head_dim"), [("float32", 64), ("bfloat16", 64), ("bfloat16", 49)])
def test_a_row_has_the_same_bits_in_any_company(isa, dtype, head_dim, options, force):
    """In other blocks, whose keys begin and end elsewhere, odd numbers among them."""
    force(isa)
    rng = np.random.default_rng(9)
    q, k, v = (rng.standard_normal((2, 4, 333, head_dim), dtype=np.float32).astype(dtype_of(dtype)) for _ in range(3))
    whole = runner.bits(fa_ext.attention(q, k, v, **options, kernel=KERNEL))
    entry = fa_ext.attention(q[1:], k[1:], v[1:], **options, kernel=KERNEL)
    np.testing.assert_array_equal(whole[1:], runner.bits(entry))
    for count in (1, 5, 30, 73):
        last = fa_ext.attention(q[:, :, -count:], k, v, **options, kernel=KERNEL)
        np.testing.assert_array_equal(whole[:, :, -count:], runner.bits(last))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize(
    ("heads_kv", "options"),
    [(4, {}), (2, {}), (4, {"causal": "bottom_right"}), (4, {"window": (70, 3)}), (2, {"window": (0, 0)}), (4, {"sinks": [3, -1, np.inf, 0]})],
    ids=str,
)  # fmt: skip
def test_a_row_has_the_same_bits_alone(isa, dtype, heads_kv, options, force):
    """Few rows, as in decoding, take a way of their own; a mask that hides nothing keeps them from it."""
    force(isa)
    rng = np.random.default_rng(10)
    shapes = (2, 4, 7, 64), (2, heads_kv, 413, 64), (2, heads_kv, 413, 48)
    q, k, v = (rng.standard_normal(shape).astype(dtype_of(dtype)) for shape in shapes)
    if "sinks" in options:
        options = {"sinks": np.array(options["sinks"], q.dtype)}
    mask = np.ones((1, 413), bool)
    whole = fa_ext.attention(q, k, v, **options, mask=mask, return_lse=True, kernel=KERNEL)
    for count in range(1, 8):
        few = fa_ext.attention(q[:, :, 7 - count :], k, v, **options, return_lse=True, kernel=KERNEL)
        for one, other in zip(whole, few):
            np.testing.assert_array_equal(runner.bits(one[:, :, 7 - count :]), runner.bits(other))


@pytest.mark.parametrize("isa", ISAS)
def test_one_query_is_safe_from_what_it_does_not_see(isa, force):
    force(isa)
    rng = np.random.default_rng(11)
    q, k, v = (rng.standard_normal((1, 3, n, 32), dtype=np.float32) for n in (1, 300, 300))
    clean = fa_ext.attention(q, k[:, :, 100:], v[:, :, 100:], kernel=KERNEL)
    k[:, :, :100], v[:, :, :100] = np.nan, np.inf
    np.testing.assert_allclose(fa_ext.attention(q, k, v, window=(199, None), kernel=KERNEL), clean, rtol=1e-5, atol=1e-6)
    v[:, :, 299, 5] = np.nan
    out = fa_ext.attention(q, k, v, window=(199, None), kernel=KERNEL)
    assert np.isnan(out[..., 5]).all() and np.isfinite(out[..., :5]).all()


@pytest.mark.parametrize(
    "case",
    [
        Case(1, 5, 5, 1, 1023, 64, dtype="float32", values="large"),
        Case(2, 8, 2, 1, 799, 128, 32, dtype="float32", strides="mixed", sinks="same"),
        Case(1, 2, 2, 3, 113, 96, dtype="float64", causal="bottom_right"),
        Case(1, 3, 3, 2, 239, 256, dtype="bfloat16", window=(17, 0)),
        Case(3, 2, 1, 1, 5, 16, dtype="float16", layout="bshd"),
        Case(1, 2, 2, 2, 1, 64, dtype="float32", causal="bottom_right"),
        Case(1, 2, 2, 1, 0, 64, dtype="float32", sinks="float32"),
    ],
    ids=str,
)
@pytest.mark.parametrize("isa", ISAS)
def test_few_rows(isa, case, force):
    force(isa)
    report = runner.verdict(KERNEL, case)
    assert report, str(report)


# ---- threads and processes ----

PRELUDE = """
    import os, sys
    import numpy as np, fa_ext
    q = np.random.default_rng(0).standard_normal((1, 8, 512, 64), dtype=np.float32)
    run = lambda: fa_ext.attention(q, q, q, kernel="cpu_simd")
    tasks = lambda: len(os.listdir("/proc/self/task"))

    def helpers():  # ids of the threads that a call starts
        before = set(os.listdir("/proc/self/task"))
        run()
        return sorted(map(int, set(os.listdir("/proc/self/task")) - before))
"""


def script(text, **env):
    """The output of a fresh interpreter."""
    source = textwrap.dedent(PRELUDE) + textwrap.dedent(text)
    path = os.pathsep.join(p for p in sys.path if p)
    env = os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": path} | env
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


linux = pytest.mark.skipif(sys.platform != "linux", reason="looks at threads in /proc")


@linux
@pytest.mark.parametrize("count", [1, 3, 9])
def test_omp_num_threads_is_respected(count):
    assert script("print(len(helpers()))", OMP_NUM_THREADS=str(count)) == str(count - 1)


@linux
def test_omp_thread_limit_is_respected():
    assert script("print(len(helpers()))", OMP_NUM_THREADS="7", OMP_THREAD_LIMIT="3") == "2"


@linux
@pytest.mark.parametrize("nonsense", ["0", "-2", "many", "99999999999999999999"])
def test_nonsense_in_omp_num_threads_means_all_cores(nonsense):
    text, cores = "print(len(helpers()))", len(os.sched_getaffinity(0))
    assert script(text, OMP_NUM_THREADS=nonsense) == script(text, OMP_NUM_THREADS=str(cores))


@linux
def test_small_calls_wake_few():
    text = """
        before, shown = tasks(), []
        for length in (16, 32, 64, 128):
            x = np.ascontiguousarray(q[:, :, :length])
            fa_ext.attention(x, x, x, kernel="cpu_simd")
            shown.append(tasks() - before)
        fa_ext.attention(q, q, q, window=(1, 1), kernel="cpu_simd")
        print(*shown, tasks() - before)
    """
    # Two threads from 1e6 multiplications on, 1 + work / 8e6 of more: work is 0.3, 1.0, 4.2, 16.8 and 1.6e6.
    assert script(text, OMP_NUM_THREADS="9") == "0 1 1 2 2"


@linux
def test_all_threads_round_as_the_caller_does():
    text = """
        import ctypes, platform
        upward = {"x86_64": 0x800, "aarch64": 0x400000}.get(platform.machine())
        want = run()
        omp, libm = ctypes.CDLL("libgomp.so.1"), ctypes.CDLL("libm.so.6")
        assert upward is None or libm.fesetround(upward) == 0
        omp.omp_set_num_threads(1)
        alone = run()
        omp.omp_set_num_threads(3)
        print(upward is None or not np.array_equal(alone, want), all(np.array_equal(run(), alone) for _ in range(50)))
    """
    assert script(text, OMP_NUM_THREADS="3") == "True True"


def test_callers_in_many_threads():
    text = """
        import threading
        shapes = [(1, 3, 300, 40), (2, 2, 150, 64), (1, 1, 700, 16), (4, 4, 64, 64)]
        inputs = [np.random.default_rng(n).standard_normal(shapes[n % 4], dtype=np.float32) for n in range(8)]
        call = lambda x: fa_ext.attention(x, x, x, causal=True, kernel="cpu_simd")
        want, wrong = [call(x) for x in inputs], []

        def work(n):
            for _ in range(200):
                if not np.array_equal(call(inputs[n]), want[n]):
                    wrong.append(n)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(wrong)
    """
    assert script(text, OMP_NUM_THREADS="5") == "[]"


# ---- the environment ----


def test_an_unknown_instruction_set_is_an_error_that_lists_the_known():
    text = """
        for call in (fa_ext.attention, fa_ext.verify):
            try:
                call(q, q, q, kernel="cpu_simd")
            except ValueError as error:
                print(error)
        print(fa_ext.explain(q, q, q, kernel="cpu_simd"))
        first = next(kernel for kernel in fa_ext.kernels() if kernel.startswith("cpu"))
        try:
            print("ran", first)
            fa_ext.attention(q, q, q)
        except ValueError as error:
            print(error)
    """
    lines = script(text, FA_EXT_CPU_ISA="mmx").splitlines()
    message = 'FA_EXT_CPU_ISA was "mmx" when fa_ext was imported; accepted on this platform: '
    assert len(lines) >= 4 and lines[0] == lines[1] and lines[0].startswith(message) and lines[0].endswith("generic")
    assert lines[2].startswith("(None, {") and message in lines[2]
    assert lines[4:] == lines[:1] if lines[3] == f"ran {KERNEL}" else len(lines) == 4  # the one that is chosen


def test_the_instruction_set_is_read_once():
    text = """
        os.environ["FA_EXT_CPU_ISA"] = "mmx"
        print(run().shape == q.shape)
    """
    assert script(text, FA_EXT_CPU_ISA="generic") == "True"


@pytest.mark.parametrize(
    "limited, shape, dtype",
    [(KERNEL, (2, 4, 300, 256), "float64"), (KERNEL, (1, 1, 9000, 8), "float32"), ("cpu_ref", (1, 1, 200_000, 1), "float32")],
)
def test_the_workspace_limit_changes_no_bit(limited, shape, dtype):
    text = f"""
        import hashlib
        shape = {shape}
        k = np.random.default_rng(0).standard_normal(shape).astype("{dtype}")
        x = k if "{limited}" == "cpu_simd" else k[:, :, :3].copy()
        before = tasks()
        out, lse = fa_ext.attention(x, k, k, return_lse=True, kernel="{limited}")
        print(hashlib.sha256(out.tobytes() + lse.tobytes()).hexdigest(), tasks() - before)
    """
    (bits, many), (same, few) = (
        script(text, OMP_NUM_THREADS="6", FA_EXT_WORKSPACE_MB=mb).split() for mb in ("512", "1")
    )
    assert bits == same and int(few) <= int(many)
    if dtype == "float64" and sys.platform == "linux":
        assert (int(many), int(few)) == (5, 0)  # six times 0.7 MB and more do not fit


# ---- processes ----


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("gcc"), reason="counts threads in /proc, needs gcc")
def test_a_call_inside_a_parallel_region_starts_no_threads(tmp_path):
    source = "void team(void (*call)(void)) {\n#pragma omp parallel num_threads(2)\n    call();\n}\n"
    (tmp_path / "team.c").write_text(source)
    built = ["gcc", "-shared", "-fPIC", "-fopenmp", "team.c", "-o", "team.so"]
    subprocess.run(built, cwd=tmp_path, check=True)
    text = """
        import ctypes, threading
        before, most, ran, done = tasks(), [], [], threading.Event()

        def watch():  # the threads of an inner team end with it
            while not done.is_set():
                most.append(tasks())

        watcher = threading.Thread(target=watch)
        watcher.start()
        team = ctypes.CDLL(os.environ["TEAM"]).team
        team(ctypes.CFUNCTYPE(None)(lambda: ran.append([run().shape for _ in range(20)])))
        done.set()
        watcher.join()
        print(len(ran), max(most) - before)
    """
    printed = script(text, TEAM=str(tmp_path / "team.so"), OMP_NUM_THREADS="3", OMP_MAX_ACTIVE_LEVELS="2")
    assert printed == "2 2"  # the watcher and the region's own second thread


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_runs_on_one_thread():
    text = """
        want = run()
        child = os.fork()
        if child == 0:
            same = np.array_equal(run(), want)
            os._exit(0 if same and tasks() == 1 else 1)
        import time
        for _ in range(600):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                print("exit", os.waitstatus_to_exitcode(status), np.array_equal(run(), want))
                break
            time.sleep(0.1)
        else:
            os.kill(child, 9)
            print("the child hangs")
    """
    assert script(text, OMP_NUM_THREADS="3") == "exit 0 True"
