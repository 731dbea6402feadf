"""The backward pass in the laboratory: cases of it, operands and their judge, kernels and peers, the command."""

import dataclasses
import json
import types

import numpy as np
import pytest

from bench import problems, report
from bench.__main__ import main
from bench.commands import measure, tables
from bench.implementations import implementation, flash3, named, peers
from bench.machine import device
from bench.problems import gradients
from bench.problems.case import Case
from bench.problems.operands import WrongResult
from bench.problems.operations import operands_of
from bench.problems.placement import dtype_of
from bench.problems.presets import PRESETS
from bench.recording import record
from fa_ext import reference
from fa_ext.reference.backward import attention_backward
from tests.laboratory.support import stand_ins
from tests.laboratory.support.command import command

CPU = device.Cpu()
LINE = "B2,H4/2,S40x24,D16,bfloat16,causal=bottom_right,sinks=float32,layout=bshd,operation=backward,deterministic=False,dlse=True"
CASES = [
    "B2,H4/2,S40,D16,float32,operation=backward",
    "B1,H2,S33x71,D16/8,float16,bias=shared,operation=backward",
    "B2,H4/2,S40x24,D16,bfloat16,window=9:2,mask=rows,alibi=batch,softcap=3.0,layout=bshd,operation=backward",
    "B1,H2,S40,D16,float32,dropout=0.2:3,operation=backward,accumulate=True",
    LINE,
]


def parsed(text):
    return problems.parse(text, problems.OPERATIONS)


def of(text, **options):
    return operands_of(parsed(text), CPU, **options)


def exact(held):
    """Gradients of the reference on the operands, in the dtype of the results."""
    given = held.arguments("numpy")
    options = {name: value for name, value in given.items() if name not in ("out", "lse", "deterministic", "accumulate")}
    found = attention_backward(**options, wrt=held.wrt)
    return [g.astype(dtype_of(held.shapes[name][1])) for g, name in zip(found, held.outputs, strict=True)]


# ---- cases ----


def test_a_line_names_the_operation():
    case = parsed(LINE)
    assert str(case) == LINE and case.operation == "backward" and not case.deterministic and case.dlse
    assert case.options() == {"causal": "bottom_right", "layout": "bshd", "deterministic": False}
    assert case.wrt() == ("q", "k", "v", "sinks")


@pytest.mark.parametrize("option", ["deterministic=False", "accumulate=True", "dlse=True"])
def test_options_of_the_backward_pass_are_refused_without_it(option):
    with pytest.raises(report.UsageError, match="are of operation=backward"):
        problems.parse(f"B1,H1,S8,D8,float32,{option}")


def test_flops_are_those_of_five_products():
    forward = Case(2, 4, 2, 128, 128, 64, 32, causal=True)
    backward = dataclasses.replace(forward, operation="backward")
    assert forward.flops() == 2 * 2 * 4 * 128 * 64 * (64 + 32)
    assert backward.flops() == 2 * 2 * 4 * 128 * 64 * (3 * 64 + 2 * 32)
    even = Case(1, 16, 16, 512, 512, 128, operation="backward")
    assert even.flops() == 10 * 16 * 512 * 512 * 128


@pytest.mark.parametrize("name", [name for name in PRESETS if name.endswith("backward")])
def test_presets_of_the_backward_pass(name):
    assert all(case.operation == "backward" and parsed(str(case)) == case for case in PRESETS[name])
    assert name not in problems.preset_names(("attention",))


# ---- operands and the judge ----


@pytest.mark.parametrize("case", CASES)
def test_the_judge_takes_the_reference_and_no_other(case):
    held = of(case)
    right = exact(held)
    assert held.judge(right).passed
    for i, name in enumerate(held.outputs):
        if right[i].any():
            wrong = [g * 2 if j == i else g for j, g in enumerate(right)]
            failures = held.judge(wrong).failures
            assert failures and all(why.startswith(f"{name}: ") for why in failures)
    with pytest.raises(WrongResult, match="gradients were returned, the problem asks for dq, dk, dv"):
        held.judge(right[:2])
    with pytest.raises(WrongResult, match="dk is .* the problem asks for"):
        held.judge([right[0], right[1][..., :3], *right[2:]])
    with pytest.raises(WrongResult, match="dq is float64"):
        held.judge([right[0].astype(np.float64), *right[1:]])


@pytest.mark.parametrize("case, pairs", [
    ("B3,H4/2,S40,D16,float32,alibi=batch,mask=rows,layout=bshd,operation=backward", (1, 1)),
    ("B3,H4/2,S40,D16,float32,operation=backward,dlse=True", (2, 2)),
    ("B3,H4/2,S40,D16,float32,bias=shared,sinks=float32,operation=backward", (3, 1)),
])  # fmt: skip
def test_large_problems_meet_the_reference_on_drawn_heads(case, pairs, monkeypatch):
    flops = parsed(case).flops() / 6
    monkeypatch.setattr(gradients, "CHECK_FLOPS_CPU", flops * {1: 1, 2: 5, 3: 3}[pairs[0]])
    held = of(case)
    entries, heads = held._drawn_heads()
    assert (len(entries), len(heads)) == pairs
    right = exact(held)
    assert held.judge(right).passed
    for i in range(len(right)):  # an error in a drawn head is found, and whatever was not written in another
        wrong = [3 * g if j == i else g.copy() for j, g in enumerate(right)]
        assert not held.judge(wrong).passed, held.outputs[i]
        wrong = [g.copy() for g in right]
        wrong[i].flat[-1] = np.nan
        with pytest.raises(WrongResult, match=f"{held.outputs[i]} holds NaN"):
            held.judge(wrong)


@pytest.mark.parametrize("case", ["B2,H2,S9,D8,float32,bias=keys,operation=backward",
                                  "B2,H2,S9,D8,float32,dropout=0.2:3,operation=backward"])  # fmt: skip
def test_no_head_is_drawn_where_others_have_a_say(case, monkeypatch):
    monkeypatch.setattr(gradients, "CHECK_FLOPS_CPU", 1.0)
    assert of(case)._drawn_heads() is None


def test_gradients_that_are_added_to_begin_at_zero():
    held = of("B1,H2,S8,D8,float16,operation=backward,accumulate=True")
    assert all(held.shapes[name][1] == "float32" and not held.array(name, "numpy").any() for name in held.outputs)
    held = of("B1,H2,S8,D8,float16,operation=backward")
    assert all(np.isnan(held.array(name, "numpy")).all() for name in held.outputs)


# ---- implementations ----


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernel", ["cpu_simd_backward", "fa_ext"])
def test_kernels_write_the_gradients(kernel, case):
    held, one = of(case), named.open_implementation(kernel, CPU)
    assert "backward" in one.operations and one.refuses(held.case) is None
    assert held.judge(one.bind(held)()).passed and not held.changed_inputs() and not held.broken_guards()
    assert held.picked() in implementation.compiled_kernels(CPU, "backward")


def test_kernels_are_of_one_operation():
    assert implementation.table_of("cpu_simd") == "attention" and implementation.table_of("cpu_ref_backward") == "backward"
    assert named.open_implementation("cpu_simd", CPU).refuses(parsed(CASES[0])) == "no backward"
    assert named.open_implementation("cpu_simd_backward", CPU).refuses(Case()) == "no attention"


class Aten:
    """torch's operators for a GPU, with the arguments that they have in torch 2.11, by the float64 reference. Dropout draws one mask."""

    def __init__(self):
        self.modes, self.out, self.drops = [], None, 0.0

    def attend(self, q, k, v, attn_bias, dropout_p, is_causal, scale):
        """The output of a forward, which the backward pass must be given back; without dropout nobody looks into it."""
        self.drops, self.out = dropout_p, "out"
        if dropout_p:
            options = {"scale": scale, "causal": "top_left" if is_causal else False, "dropout": (dropout_p, 11)}
            options |= {} if attn_bias is None else {"bias": np.asarray(attn_bias)}
            self.out = reference.attention(q, k, v, **options)[0].astype(q.dtype)
        return self.out

    def gradients(self, dout, q, k, v, saved, dropout_p, scale, is_causal, attn_bias=None):
        assert saved[0] is self.out and saved[1:] == ["lse", "cum_q", "cum_k", "max_q", "max_k", "seed", "offset"]
        assert dropout_p == self.drops
        options = {"scale": scale, "causal": "top_left" if is_causal else False, "dropout": (dropout_p, 11) if dropout_p else None}
        options |= {} if attn_bias is None else {"bias": np.asarray(attn_bias)}
        wrt = ("q", "k", "v", "bias") if "bias" in options else ("q", "k", "v")
        return tuple(g.astype(q.dtype) for g in attention_backward(dout, q, k, v, wrt=wrt, **options))

    def _scaled_dot_product_flash_attention(self, query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False,
                                            *, scale=None):  # fmt: skip
        assert not return_debug_mask
        return self.attend(query, key, value, None, dropout_p, is_causal, scale), "lse", "cum_q", "cum_k", "max_q", "max_k", "seed", "offset", "debug"

    def _scaled_dot_product_flash_attention_backward(
        self, grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, philox_seed,
        philox_offset, *, scale=None,
    ):  # fmt: skip
        saved = [out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, philox_seed, philox_offset]
        return self.gradients(grad_out, query, key, value, saved, dropout_p, scale, is_causal)

    def _scaled_dot_product_cudnn_attention(self, query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0,
                                            is_causal=False, return_debug_mask=False, *, scale=None):  # fmt: skip
        assert compute_log_sumexp is True
        return self.attend(query, key, value, attn_bias, dropout_p, is_causal, scale), "lse", "cum_q", "cum_k", "max_q", "max_k", "seed", "offset", "debug"

    def _scaled_dot_product_cudnn_attention_backward(
        self, grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q, cum_seq_k, max_q,
        max_k, dropout_p, is_causal, *, scale=None,
    ):  # fmt: skip
        saved = [out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, philox_seed, philox_offset]
        return self.gradients(grad_out, query, key, value, saved, dropout_p, scale, is_causal, attn_bias)[:3]

    def _scaled_dot_product_efficient_attention(self, query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0,
                                                is_causal=False, *, scale=None):  # fmt: skip
        assert compute_log_sumexp is True
        return self.attend(query, key, value, attn_bias, dropout_p, is_causal, scale), "lse", "seed", "offset"

    def _scaled_dot_product_efficient_attention_backward(
        self, grad_out_, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset, dropout_p, grad_input_mask,
        is_causal=False, *, scale=None,
    ):  # fmt: skip
        assert grad_input_mask[:3] == [True] * 3 and (attn_bias is not None or not grad_input_mask[3])
        saved = [out, logsumexp, "cum_q", "cum_k", "max_q", "max_k", philox_seed, philox_offset]
        found = self.gradients(grad_out_, query, key, value, saved, dropout_p, scale, is_causal, attn_bias)
        return (*found[:3], found[3].view(Bias) if grad_input_mask[3] else None)


class Bias(np.ndarray):
    """The part of a torch tensor that the adapter asks of a bias, its gradient, and a mask."""

    device = "cuda"

    def expand(self, *shape):
        assert len(shape) == 4
        return np.broadcast_to(self, shape)

    def sum_to_size(self, shape):
        axes = tuple(i for i, n in enumerate(shape) if n == 1 and self.shape[i] != 1)
        return np.asarray(self.astype(np.float64).sum(axis=axes, keepdims=True).astype(self.dtype))


PEER_CASES = [
    "B2,H2,S40,D16,float16,operation=backward",
    "B1,H2,S40,D16,bfloat16,causal=True,scale=0.3,layout=bshd,operation=backward",
    "B1,H4/2,S40,D16,float16,operation=backward",
    "B1,H2,S24x40,D16,float16,causal=bottom_right,operation=backward",
    "B2,H2,S24x48,D16,float16,bias=shared,operation=backward",
    "B1,H2,S40,D16,float16,window=5:none,causal=True,operation=backward",
    "B1,H2,S24x40,D16,float16,softcap=2.0,layout=bshd,operation=backward",
    "B1,H2,S40,D16,float32,operation=backward",
    "B1,H2,S40,D16,float16,dropout=0.1:1,operation=backward",
    "B1,H2,S40,D16,float16,operation=backward,dlse=True",
    "B1,H2,S40,D16,float16,operation=backward,accumulate=True",
    "B1,H2,S40,D16,float16,operation=backward,deterministic=False",
    "B2,H2,S24x48,D16,float16,mask=pairs,operation=backward",
    "B2,H2,S24x48,D16,float16,bias=shared,mask=padding,operation=backward",
    "B2,H2,S24x48,D16,float16,bias=shared32,operation=backward",
]
REFUSED = {
    "torch-flash": {2: None, 3: "causal only for seq_q == seq_k", 4: "no bias", 5: "no window", 6: "no softcap", 7: "no float32",
                    9: "no dlse", 10: "no accumulate", 12: "no mask", 13: "no bias, mask", 14: "no bias"},
    "torch-efficient": {2: "no grouped heads", 3: "causal only for seq_q == seq_k", 5: "no window", 6: "no softcap",
                        9: "no dlse", 10: "no accumulate", 14: "no float32 bias of float16 inputs"},
    "flash-attn-3": {4: "no bias", 7: "no float32", 8: "no dropout", 9: "no dlse", 10: "no accumulate", 12: "no mask", 13: "no bias, mask",
                     14: "no bias"},
}  # fmt: skip
REFUSED["torch-cudnn"] = {n: why for n, why in REFUSED["torch-flash"].items() if n != 12} | {13: "no bias"}
REFUSED["torch-flash-ordered"] = REFUSED["torch-flash"] | {11: "sums in order, where any order is asked for"}
REFUSED["flash-attn-3-ordered"] = REFUSED["flash-attn-3"] | {11: "sums in order, where any order is asked for"}


@pytest.fixture
def torch(monkeypatch):
    """A stand-in for torch with the operators above, whose mode is the one it was put in."""
    aten, fa3 = Aten(), stand_ins.FlashAttn3()
    mode = types.SimpleNamespace(fill_uninitialized_memory=True)
    stand_ins.stand_in(
        monkeypatch, "torch", ops=types.SimpleNamespace(aten=aten, flash_attn_3=fa3), utils=types.SimpleNamespace(deterministic=mode),
        use_deterministic_algorithms=lambda on: aten.modes.append((on, mode.fill_uninitialized_memory)), manual_seed=lambda seed: None,
        zeros=lambda shape, dtype, device: np.zeros(shape, dtype), where=lambda mask, x, y: np.where(mask, x, x.dtype.type(y)).view(Bias),
    )  # fmt: skip
    return types.SimpleNamespace(aten=aten, fa3=fa3, mode=mode)


def opened(monkeypatch, name):
    peer = peers.PEERS[name][2](types.SimpleNamespace(kind="cuda"))
    for part in (peer, getattr(peer, "backward", None)):
        if part:
            monkeypatch.setattr(part, "library", "numpy")
    return peer


@pytest.mark.parametrize("number", range(len(PEER_CASES)))
@pytest.mark.parametrize("name", REFUSED)
def test_peers_are_asked_for_what_the_problem_says(name, number, torch, monkeypatch):
    peer, problem = opened(monkeypatch, name), parsed(PEER_CASES[number])
    assert "backward" in peer.operations and peer.refuses(problem) == REFUSED[name].get(number)
    if peer.refuses(problem):
        return
    held = operands_of(problem, CPU)
    for array in problem.arrays():
        held._views[array, "numpy"] = held.array(array, "numpy").view(Bias)
    if problem.dropout:  # the draw is the library's own: another mask than the problem's
        assert peer.judged_on(held).passed and not held.judge(peer.bind(held)()).passed and peer.timing_of(problem) == "events"
        return
    found = [np.asarray(g) for g in peer.bind(held)()]
    judged = held.judge(found)
    assert judged.passed, judged.failures
    ordered = name.endswith("ordered")
    assert all(asked is ordered for asked in torch.fa3.asked)
    assert torch.aten.modes == ([(True, False), (False, False)] if ordered and "torch" in name else [])
    assert torch.mode.fill_uninitialized_memory is True


def test_flash_attention_3_keeps_no_order_at_head_dim_256(torch, monkeypatch):
    case = parsed("B1,H2,S40,D256,float16,operation=backward")
    assert "no order of sums" in opened(monkeypatch, "flash-attn-3-ordered").refuses(case)
    assert opened(monkeypatch, "flash-attn-3").refuses(case) is None


def test_the_library_of_flash_attention_3_is_found_in_wheels_that_need_not_import(tmp_path, monkeypatch):
    folder = tmp_path / "xformers" / "flash_attn_3"
    folder.mkdir(parents=True)
    (tmp_path / "xformers" / "__init__.py").write_text("raise ImportError('built for another torch')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "xformers", raising=False)
    assert list(flash3.libraries("flash_attn_3")) == []
    (folder / "_C.so").write_bytes(b"")
    assert list(flash3.libraries("flash_attn_3")) == [folder / "_C.so"]
    loaded = []
    monkeypatch.setattr(flash3.ctypes, "CDLL", lambda path, mode: loaded.append(path))
    (folder / "libcudart.so.12").write_bytes(b"")
    flash3.load_runtimes(folder)
    assert loaded[0] == str(folder / "libcudart.so.12") and len(loaded) == 2

    def broken(path, mode):
        raise OSError("no such file")

    monkeypatch.setattr(flash3.ctypes, "CDLL", broken)
    with pytest.raises(ImportError, match="needs one of libcudart.so.12, .* as of the package nvidia-cuda-runtime-cu12"):
        flash3.load_runtimes(folder)


def test_flash_attention_3_says_what_is_missing(monkeypatch):
    stand_ins.stand_in(monkeypatch, "torch", ops=types.SimpleNamespace(flash_attn_3=types.SimpleNamespace()))
    monkeypatch.setattr(flash3, "libraries", lambda namespace: iter(()))
    found, missing = peers.available(types.SimpleNamespace(kind="cuda"), ["flash-attn-3"])
    assert not found and "no package flash_attn_interface, no file _C*.so in flash_attn_3, no file flash_attn_3/_C*.so in xformers" in missing["flash-attn-3"]


@pytest.mark.parametrize("case", ["B1,H2,S40,D16,float32,operation=backward", "B2,H4/2,S24x40,D16/8,float64,operation=backward",
                                  "B2,H4/2,S40,D16,bfloat16,causal=True,layout=bshd,operation=backward"])  # fmt: skip
def test_numpy_differentiates(case):
    held, peer = of(case), named.open_implementation("numpy", CPU)
    assert held.judge(peer.bind(held)()).passed and not held.changed_inputs()
    assert peer.refuses(parsed(f"{case},dlse=True")) == "no dlse"


@pytest.mark.parametrize("case", ["B1,H2,S40,D16,float32,operation=backward",
                                  "B2,H2,S40,D16,bfloat16,causal=True,layout=bshd,operation=backward"])  # fmt: skip
def test_torch_itself_on_the_cpu(case):
    pytest.importorskip("torch")
    held = of(case)
    peer = named.open_implementation("torch-flash", CPU)
    assert "backward" in peer.operations and peer.refuses(held.case) is None
    judged = held.judge(peer.bind(held)())
    assert judged.passed, judged.failures


def test_operators_of_torch_are_those_the_adapters_call():
    torch = pytest.importorskip("torch")
    for backend in ("flash", "cudnn", "efficient"):
        for end in ("", "_backward"):
            name = f"_scaled_dot_product_{backend}_attention{end}"
            schema = getattr(torch.ops.aten, name).default._schema
            ours = Aten.__dict__[name].__code__
            expected = ours.co_varnames[1 : ours.co_argcount + ours.co_kwonlyargcount]
            assert [a.name for a in schema.arguments] == list(expected)


# ---- the command ----


def test_measure_times_backward_kernels_beside_peers(capfd):
    case = "B1,H2,S64,D16,float32,causal=True,operation=backward"
    status, document = command(capfd, "measure", "--case", case, "--device", "cpu", "--seconds", "0.3", "--rounds", "5")
    (cell,) = document["cells"].values()
    assert status == 0 and {"cpu_simd_backward", "cpu_ref_backward"} <= set(cell["figures"])
    assert "numpy" in cell["figures"] and "cpu_simd" not in cell["figures"] and not cell["refused"]
    figures = cell["figures"]["cpu_simd_backward"]
    assert figures["tflops"] == pytest.approx(10 * 2 * 64 * 64 * 16 / 2 / figures["us"] * 1e-6)
    assert cell["picked"] == "cpu_simd_backward" and 0 < figures["frobenius"] < 1e-5


def test_wrong_gradients_are_not_timed(monkeypatch):
    class Wrong(implementation.Implementation):
        operations = frozenset({"backward"})

        def refuses(self, case):
            return None

        def bind(self, operands):
            return lambda: [np.zeros(operands.shapes[name][0], np.float32) for name in operands.outputs]

    monkeypatch.setattr(measure, "_open", {("wrong", "cpu"): Wrong("wrong", "numpy")})
    cell = measure.cell("B1,H2,S64,D16,float32,operation=backward", "hot", device="cpu", candidates=["wrong", "cpu_simd_backward"], peers=[], rounds=3,
                        seconds=0.1, tight=0.5)  # fmt: skip
    assert cell["refused"]["wrong"].startswith("WRONG: dq: ") and set(cell["figures"]) == {"cpu_simd_backward"}


def test_evidence_measures_backward_kernels_of_their_own_presets(tmp_path, monkeypatch):
    output = tmp_path / "machine.json"
    case = "B1,H8,S512,D64,float32,operation=backward"
    line = ["evidence", "--device", "cpu", "--parts", "measure", "--filter", f"^{case}$", "--seconds", "0.2", "--output", str(output)]
    monkeypatch.setattr(peers, "PEERS", {})
    assert main([*line, "--kernels", "simd"]) == 0
    document = json.loads(output.read_text())
    (run,) = document["cells"][f"{case} hot"]
    assert set(run["figures"]) == {"cpu_simd_backward"} and list(document["cells"]) == [f"{case} hot"]
    (code,) = run["code"]
    assert document["codes"][code]["kernel"] == "cpu_simd_backward"
    states = record.states(document, {})
    assert states["cpu_simd_backward"]["state"] == "fresh" and states["cpu_simd_backward"]["parts"] == {"measure": 1}
    assert main(line) == 0  # the other kernel alone is lacking
    assert [set(r["figures"]) for r in json.loads(output.read_text())["cells"][f"{case} hot"]][-1] == {"cpu_ref_backward"}


def test_the_table_of_the_backward_pass():
    cases = [str(case) for case in PRESETS["paper-backward"]]
    assert tables._backward({"gpu": {"cells": {}}}) == "The record holds no figures of the backward pass yet."

    def run(**us):
        return [{"figures": {name.replace("_p_", "-"): {"us": x, "tflops": 1000 / x} for name, x in us.items()}}]

    cells = {f"{cases[0]} hot": run(simt_backward=10.0, wgmma_backward_sm90=2.0, torch_p_cudnn=3.0, flash_p_attn_p_3=2.2,
                                    flash_p_attn_p_3_p_ordered=2.5)}  # fmt: skip
    cells[f"{cases[-1]} hot"] = run(simt_backward=10.0, torch_p_cudnn=5.0)
    text = tables._backward({"gpu": {"cells": cells}})
    assert text.splitlines()[2:] == [
        "| 32 32 512 64 | full | 100 | 500 | 333 | 455 | 400 | 1.10 | 1.25 |",
        "| 1 8 512 64 float16 | causal | 100 | - | 200 | - | - | 0.50 | - |",
    ]
    columns = text.splitlines()[0]
    assert "`simt_backward` | `wgmma_backward_sm90` | cuDNN | FlashAttention-3 | FlashAttention-3, ordered |" in columns


def test_commands_say_which_operations_they_take(capfd):
    assert main(["references", "--case", "B1,H2,S64,D16,float32,operation=backward"]) == 3
    assert "operation backward; accepted here: attention" in capfd.readouterr().err
    assert main(["gate", "cpu_simd", "--preset", "cpu-serving"]) == 3
    assert "preset is 'cpu-serving'; accepted: history" in capfd.readouterr().err
    assert main(["gate", "cpu_simd", "--case", "B1,H2,S1x64,D16,float32,q=one,k=paged,slack=0"]) == 3
    assert "accepted by gate: cases without sequences, and gradients of packed ones" in capfd.readouterr().err
