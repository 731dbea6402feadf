"""wgmma_fused_backward_sm90: gradients against float64 on the emulator, races, workspace, sums in one order whatever runs
when; on a GPU, the contract and equal bits."""

import os
import platform
import shutil
import subprocess
import sys

import numpy as np
import pytest

import fa_ext
from bench.problems.case import Case
from bench.problems.placement import Unplaceable, dtype_of, place
from fa_ext import _build
from tests import emulator
from tests.contract import gradients, runner
from tests.emulator.emulated import on_the_cpu, replaced

NAME = "wgmma_fused_backward_sm90"
SOURCE = _build.kernel_files()[NAME]

on_emulator = pytest.mark.skipif(
    shutil.which("g++") is None or sys.platform != "linux" or platform.machine() != "x86_64",
    reason="the emulator is for g++ on x86-64 Linux",
)
#: Two tiles of keys or more each: two blocks or one, of one query or key too many; groups; what nobody sees at both ends.
CASES = [
    "B1,H2/1,S1x133,D64,bfloat16",
    "B1,H2/1,S70x3,D128,bfloat16",
    "B1,H1,S1,D64,bfloat16",
    "B1,H2/1,S128x133,D64,bfloat16",
    "B1,H2/2,S257x129,D64,bfloat16,layout=bshd",
    "B1,H2/1,S130x257,D128,bfloat16",
    "B2,H2,S133,D64,bfloat16,causal=bottom_right,sinks=same",
    "B1,H4/2,S140x190,D64,bfloat16,window=30:none,layout=bshd",
    "B1,H2/1,S300x190,D128,bfloat16,causal=top_left,sinks=float32",
    "B1,H2/1,S190x300,D104,bfloat16,window=50:20",
    "B1,H3/1,S201x130,D40,bfloat16,causal=bottom_right",
    "B1,H1,S128,D64,bfloat16,causal=bottom_right",
    "B1,H1,S129x300,D128,bfloat16",
    "B1,H2/1,S200,D64,bfloat16,softcap=5.0,causal=top_left",
    "B1,H2/1,S200x130,D128,bfloat16,softcap=5.0",
    "B1,H2,S900,D64,bfloat16,window=150:60",
    "B2,H4/2,S260,D128,bfloat16,causal=top_left",
]
#: Of one order: all of head_dim 64. Tiles of keys that see all queries, some, the same, others; blocks that no key sees.
ORDERED = [case for case in CASES if "D128" not in case and "D104" not in case]
ORDERED += [
    "B1,H2/1,S520x500,D64,bfloat16,causal=bottom_right",
    "B1,H1,S400x520,D64,bfloat16,window=150:60",
    "B1,H1,S500,D64,bfloat16,window=none:200",
    "B1,H1,S300x520,D64,float16",
    "B1,H2/1,S400x130,D64,bfloat16,causal=bottom_right",
    "B1,H1,S520x140,D64,bfloat16,window=30:none",
]
#: FA_EMULATOR_SEED, FA_EMULATOR_SMS, FA_EMULATOR_TOGETHER
RUNS = [(0, 132, 1), (0, 3, 3), (1, 132, 8), (2, 2, 2), (3, 1, 1), (4, 4, 4), (5, 5, 2)]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """emulated(tag="", races=False, instances="", edit=None): the name under which the kernel is loaded, once a tag."""
    folder, loaded = tmp_path_factory.mktemp("fused"), {}

    def get(tag="", **options):
        if tag not in loaded:
            target = folder / f"{NAME}.{len(loaded)}.so"
            emulator.build(SOURCE, target, **{"instances": "_bf16$"} | options)
            loaded[tag] = emulator.load(target, NAME)
            get.targets[loaded[tag]] = target
        return loaded[tag]

    get.targets = {}
    with on_the_cpu(loaded.values):
        yield get


def verdict(kernel, problem):
    return gradients.verdict(kernel, problem)


@on_emulator
@pytest.mark.parametrize("seed, blocks", [(0, 132), (5, 1)])
@pytest.mark.parametrize("case", CASES)
def test_gradients(emulated, monkeypatch, case, seed, blocks):
    monkeypatch.setenv("FA_EMULATOR_SEED", str(seed))
    monkeypatch.setenv("FA_EMULATOR_SMS", str(blocks))
    report = verdict(emulated(), gradients.make(Case.parse(case), dlse=seed == 0))
    assert report, report


def in_order(kernel, problem, monkeypatch, run):
    """Gradients of one of RUNS."""
    for name, value in zip(("SEED", "SMS", "TOGETHER"), run):
        monkeypatch.setenv(f"FA_EMULATOR_{name}", str(value))
    return gradients.run(kernel, problem, deterministic=True)


def differ(a, b):
    return [name for name in a if (runner.bits(a[name]) != runner.bits(b[name])).any()]


@on_emulator
@pytest.mark.parametrize("case", ORDERED)
def test_one_order(emulated, monkeypatch, case):
    """The same bits whatever the blocks do meanwhile, on any number of multiprocessors."""
    kernel = emulated("float16", instances="^ordered_d64_full_f16$") if case.split(",")[4] == "float16" else emulated()
    problem = gradients.make(Case.parse(case))
    first = in_order(kernel, problem, monkeypatch, RUNS[0])
    report = gradients.judged(kernel, problem, first)
    assert report, report
    for run in RUNS[1:]:
        assert not differ(in_order(kernel, problem, monkeypatch, run), first), run


#: Sequences without keys or queries, of one tile of keys and of many; what nobody sees at both ends of one.
LENGTHS = dict(n_q=(300, 0, 1, 140, 257, 3), n_k=(520, 3, 260, 0, 129, 1), head_dim=64, dtype="bfloat16", operation="backward", dlse=True)
SEQUENCES = [
    Case.sequences(**LENGTHS, heads=2, heads_kv=1, k="packed", causal="bottom_right", sinks=True),
    Case.sequences(**LENGTHS, heads=2, heads_kv=2, k="packed"),
    Case.sequences(**LENGTHS, heads=2, heads_kv=2, q="padded", k="padded", layout="bhsd", causal="top_left", k_range=True),
    Case.sequences(**LENGTHS, heads=1, heads_kv=1, k="packed", window=(70, 40), accumulate=True),
]


@on_emulator
@pytest.mark.parametrize("case", SEQUENCES)
def test_one_order_of_sequences(emulated, monkeypatch, case):
    """Blocks that run at a time wait for the turns of a sequence."""
    kernel, problem = emulated(), gradients.make(case)
    first = in_order(kernel, problem, monkeypatch, RUNS[0])
    report = gradients.judged(kernel, problem, first)
    assert report, report
    for run in RUNS[1:]:
        assert not differ(in_order(kernel, problem, monkeypatch, run), first), run


@on_emulator
@pytest.mark.parametrize("head_dim", [64, 40])
@pytest.mark.parametrize("case", SEQUENCES)
def test_sequences_that_ask_for_no_order(emulated, monkeypatch, case, head_dim):
    for seed, blocks, together in RUNS[1:4]:
        for name, value in (("SEED", seed), ("SMS", blocks), ("TOGETHER", together)):
            monkeypatch.setenv(f"FA_EMULATOR_{name}", str(value))
        problem = gradients.make(case.changed(head_dim=head_dim, head_dim_v=head_dim, deterministic=False))
        report = verdict(emulated(), problem)
        assert report, report


@on_emulator
@pytest.mark.parametrize("tag, old, new", [
    ("does not wait", "if (!first) wait_turn(p.turns + block, turn);", ""),
    ("does not store", "if (!first) wait_turn(p.turns + block, turn);", "wait_turn(p.turns + block, first ? 0 : turn); first = false;"),
    ("the first makes dq", "last = walk.block < after.begin || walk.block >= after.end", "last = first"),
    ("a part is left out", "if (!(block & kAddsFirst)) take_part(dq, to);", ""),
])  # fmt: skip
def test_mutants_of_turns(emulated, monkeypatch, tag, old, new):
    """A block that does not wait for its turn adds in another order under some seed; sums that nobody cleared are NaN."""

    def edit(text):
        return replaced("const bool first = walk.block", "bool first = walk.block")(replaced(old, new)(text))

    kernel = emulated(tag, instances="^ordered_d64_full_bf16$", edit=edit)
    problem = gradients.make(Case.parse("B1,H1,S300x1000,D64,bfloat16"))
    right = in_order(emulated(), problem, monkeypatch, RUNS[0])
    assert any(differ(in_order(kernel, problem, monkeypatch, (seed, 8, 8)), right) == ["q"] for seed in range(1, 9))


@on_emulator
@pytest.mark.parametrize("case, deterministic", [
    ("B1,H2/1,S300x190,D64,bfloat16", False),
    ("B1,H2/1,S130x300,D128,bfloat16,causal=bottom_right", False),
    ("B1,H1,S300x190,D64,bfloat16,causal=bottom_right", True),
])  # fmt: skip
def test_no_race(emulated, monkeypatch, case, deterministic):
    monkeypatch.setenv("FA_EMULATOR_SEED", "1")
    monkeypatch.setenv("FA_EMULATOR_SMS", "1")
    kernel = emulated("races", instances="^(ordered_)?d(64|128)_(full|masked)_bf16$", races=True)
    assert gradients.verdict(kernel, gradients.make(Case.parse(case)), deterministic=deterministic)


@on_emulator
def test_queries_of_few_keys(emulated):
    """Three keys nearly alike: dP - delta rounded to bfloat16 left dq's bound."""
    problem = gradients.make(Case.parse("B1,H1,S462x373,D64,bfloat16,window=0:291,layout=bshd,values=descending,seed=173"), dlse=False)
    report = verdict(emulated(), problem)
    assert report, report


@on_emulator
@pytest.mark.parametrize("wrt", [("v",), ("k",), ("q",), ("sinks",), ("v", "q")])
def test_some_gradients(emulated, wrt):
    problem = gradients.make(Case.parse("B1,H2/1,S133x150,D64,bfloat16,causal=top_left,sinks=same"), wrt=wrt)
    assert verdict(emulated(), problem)


@on_emulator
@pytest.mark.parametrize("dout", ["none", "normal"])
def test_without_dout_or_dlse(emulated, dout):
    assert verdict(emulated(), gradients.make(Case.parse("B1,H2/1,S133x150,D64,bfloat16"), dlse=dout == "none", dout=dout))


@on_emulator
@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [64, 40])
def test_accumulate_adds_before_it_rounds(emulated, kind, head_dim):
    case = Case.parse(f"B1,H4/2,S133x150,D{head_dim},bfloat16,causal=bottom_right,sinks=same")
    kernel, rng, wrt = emulated(), np.random.default_rng(1), ("q", "k", "v", "sinks")
    arrays = gradients.placed(gradients.make(case), kernel)
    grads = tuple(rng.standard_normal(arrays[n].shape).astype(dtype_of(kind)) for n in wrt)
    grads = tuple(place(x, runner.library_for(kernel, case)) for x in grads)
    report = fa_ext.verify_backward(**arrays, wrt=wrt, grads=grads, accumulate=True, kernel=kernel, deterministic=False)
    assert report, report


@on_emulator
def test_what_nobody_sees_reaches_nothing(emulated):
    """Keys beyond every window and queries that see no key hold NaN, LSE far below what float32 exponentiates."""
    problem = gradients.make(Case.parse("B1,H2/1,S150x300,D64,bfloat16,window=40:0,causal=top_left"))
    before = gradients.run(emulated(), problem)
    for name in "kv":
        problem.inputs[name][:, :, 150:] = np.nan
    after = gradients.run(emulated(), problem)
    for name in "qkv":
        np.testing.assert_array_equal(runner.bits(before[name]), runner.bits(after[name]))
    shifted = gradients.make(Case.parse("B1,H2/1,S150x200,D64,bfloat16,scale=40.0"))  # rows with LSE of hundreds, both signs
    shifted.inputs["q"][:, :, :, :8] += 4.0
    shifted.inputs["k"][:, :, :, :8] -= 4.0
    out, lse = fa_ext.reference.attention(**{n: shifted.inputs[n] for n in "qkv"}, scale=40.0)
    shifted.inputs |= {"out": out.astype(shifted.inputs["out"].dtype), "lse": lse.astype(np.float32)}
    assert (lse < -1000).any()
    assert verdict(emulated(), shifted)


LIMITED = """
import sys
from pathlib import Path
import fa_ext
from bench.problems.case import Case
from bench.problems.placement import Unplaceable
from tests import emulator
from tests.contract import gradients, runner

kernel = emulator.load(Path(sys.argv[1]), sys.argv[2])
runner.device_of = lambda kernel: "cpu"
order = {"deterministic": sys.argv[3] == "True"}
report = gradients.verdict(kernel, gradients.make(Case.parse("B2,H4/2,S1000x130,D64,bfloat16,causal=top_left,sinks=same")), **order)
assert report, report
try:
    gradients.verdict(kernel, gradients.make(Case.parse("B1,H8/1,S1000x140,D64,bfloat16")), **order)
except Unplaceable as error:
    print(error)
"""


@on_emulator
@pytest.mark.parametrize("deterministic", [False, True])
def test_workspace_is_kept_to_its_limit(emulated, deterministic):
    """Heads go in groups: one of these needs 264 KiB."""
    target = emulated.targets[emulated()]
    environment = os.environ | {"PYTHONPATH": str(_build.ROOT), "FA_EXT_WORKSPACE_MB": "1"}
    argv = [sys.executable, "-c", LIMITED, str(target), NAME, str(deterministic)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True)
    assert not done.returncode and "FA_EXT_WORKSPACE_MB" in done.stdout, done.stdout + done.stderr


@on_emulator
@pytest.mark.parametrize("case", ["B1,H2,S170,D128,bfloat16,causal=top_left", "B1,H2,S170,D72,bfloat16"])
def test_where_sums_have_no_order(emulated, case):
    with pytest.raises(Unplaceable, match="deterministic"):
        gradients.verdict(emulated(), gradients.make(Case.parse(case)), deterministic=True)


#: More tiles of keys than a large GPU has multiprocessors, of many a head or few, equal ones and unequal.
LONG = ["B1,H32,S4096,D64,bfloat16,causal=top_left", "B1,H2,S16384,D64,float16,causal=top_left", "B2,H24/8,S1111,D64,bfloat16,causal=bottom_right",
        "B1,H16,S3000x5000,D64,bfloat16,window=700:20", "B1,H40,S2048,D64,bfloat16", "B1,H3,S16384,D64,bfloat16",
        "B3,H16/4,S1000x1500,D64,float16", "B1,H16,S1500x2500,D64,bfloat16,softcap=20.0,causal=bottom_right"]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("case", LONG)
def test_equal_bits_on_a_gpu(request, case):
    if reason := gradients.absent(NAME):
        pytest.skip(reason)
    problem = gradients.make(Case.parse(case), dlse=False)
    first = gradients.run(NAME, problem, deterministic=True)
    near = gradients.run(NAME, problem, deterministic=False)
    for name in first:
        a, b = (x[name].astype(np.float32) for x in (first, near))
        assert np.linalg.norm(a - b) <= 2e-3 * np.linalg.norm(b), name
    for _ in range(request.config.getoption("--repeats")):
        assert not differ(gradients.run(NAME, problem, deterministic=True), first)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim, deterministic", [(64, True), (40, False)])
@pytest.mark.parametrize("options", [{"causal": "bottom_right", "sinks": True}, {}, {"window": (300, 40), "q": "padded", "layout": "bhsd"}])
def test_sequences_on_a_gpu(request, head_dim, deterministic, options):
    """More tiles than multiprocessors, of sequences of all lengths; in order the same bits again."""
    if reason := gradients.absent(NAME):
        pytest.skip(reason)
    n_q, n_k = (0, 1, 900, 128, 129, 2000, 34, 500, 0, 700), (3, 0, 1100, 128, 257, 1500, 34, 64, 9, 700)
    common = dict(heads=16, heads_kv=8, head_dim=head_dim, dtype="bfloat16", operation="backward", k="packed")
    problem = gradients.make(Case.sequences(n_q, n_k, **common | options, deterministic=deterministic))
    first = gradients.run(NAME, problem)
    report = gradients.judged(NAME, problem, first)
    assert report, report
    for _ in range(request.config.getoption("--repeats") if deterministic else 0):
        assert not differ(gradients.run(NAME, problem), first)


@pytest.mark.gpu
def test_a_graph_clears_turns():
    """Each replay begins with the turns of none."""
    torch = pytest.importorskip("torch")
    if reason := gradients.absent(NAME):
        pytest.skip(reason)
    torch.manual_seed(1)
    dout, q, k, v = (torch.randn(1, 4, 1500, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    out, lse = fa_ext.attention(q, k, v, causal=True, return_lse=True)
    grads = tuple(torch.empty_like(q) for _ in range(3))

    def call():
        fa_ext.attention_backward(dout, q, k, v, out, lse, causal=True, grads=grads, kernel=NAME)

    call()
    wanted = [x.clone() for x in grads]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(5):
        for x in grads:
            x.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(grads, wanted))


@pytest.mark.gpu
@pytest.mark.slow
def test_long_sequences_on_a_gpu():
    if reason := gradients.absent(NAME):
        pytest.skip(reason)
    cases = [Case.parse(case) for case in CASES]
    cases += [Case.parse(f"B2,H4/2,S{n},D{d},{t}{mask}") for n in (511, 1023, 4096) for d in (64, 128) for t in ("bfloat16", "float16")
              for mask in ("", ",causal=bottom_right")]  # fmt: skip
    wrong = []
    for n, case in enumerate(cases):
        problem = gradients.make(case, dlse=n % 2 == 0)
        for deterministic in (False, True):
            try:
                report = gradients.verdict(NAME, problem, deterministic=deterministic)
            except Unplaceable:
                assert deterministic
                continue
            if not report:
                wrong.append(f"{case}, deterministic={deterministic}: {report}")
    assert not wrong, "\n".join(wrong[:5])
