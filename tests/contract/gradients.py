"""Running the backward pass on cases: its kernels, inputs with out and LSE of the reference, guarded results, the verdict."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
from dataclasses import dataclass

import numpy as np

import fa_ext
from bench.problems import cases, magnitudes
from bench.problems.case import Case
from bench.problems.dense import FLAT_BIASES
from bench.problems.placement import Unplaceable, dtype_of, place
from fa_ext import reference
from fa_ext.judge.backward import BackwardReport, judge_backward, judge_sequences, spread_backward, spread_sequences, zeros_of
from fa_ext.reference.backward import gradients
from tests.contract import runner, sequence_gradients
from tests.contract.devices import DEVICES, shapes_only

KERNELS = fa_ext.kernels("backward")
NAMES = ("q", "k", "v", "bias", "sinks")
_GUARD = 256
#: The kernels that may refuse no call of theirs; others may, and what tests them skips it.
TAKES_EVERYTHING = ("cpu_ref_backward", "cpu_simd_backward", "simt_backward")
#: The kernels that take slopes, and dropout.
WITH_DROPOUT = ("cpu_ref_backward", "cpu_simd_backward", "simt_backward", "mma_backward_sm80", "wgmma_dropout_backward_sm90")
WITH_ALIBI = WITH_INTERVALS = (*WITH_DROPOUT, "wgmma_fused_backward_sm90")

#: The kernels that add up dq in any order, and take some calls with deterministic=False alone.
UNORDERED = ("wgmma_fused_backward_sm90",)


def order(kernel: str) -> dict:
    """Options without which the kernel does not take every call of its own."""
    return {"deterministic": False} if runner.listed_name(kernel) in UNORDERED else {}


@functools.cache
def absent(kernel: str) -> str | None:
    """Why a backward kernel cannot run on this machine, or None."""
    if runner.device_of(kernel) == "cpu":
        return None
    if runner.no_device():
        return runner.no_device()
    problem = make(Case(1, 1, 1, 128, 128, 16, dtype="float16"))
    chosen, reasons = fa_ext.explain_backward(**placed(problem, kernel), kernel=kernel, **order(kernel))
    return None if chosen else reasons[kernel]


def dtypes(kernel: str) -> tuple[str, ...]:
    """The dtypes that a backward kernel takes."""
    halves = ("float16", "bfloat16")
    if runner.listed_name(kernel) in ("cpu_ref_backward", "cpu_simd_backward"):
        return (*halves, "float32", "float64")
    return (*halves, "float32") if runner.listed_name(kernel) == "simt_backward" else halves


@dataclass
class Problem:
    """One call: its inputs on the host (``grads`` apart), and the case that q, k, v and the options come from."""

    case: Case
    inputs: dict  #: dout, q, k, v, out, lse, dlse and options, as fa_ext.attention_backward takes them
    wrt: tuple[str, ...]
    call: dict = dataclasses.field(default_factory=dict)  #: deterministic and accumulate, where the case is of the backward pass

    @functools.cached_property
    def truth(self):
        return self.judgement(None)

    @functools.cached_property
    def plain(self):
        return self.judgement(self.case.dtype)

    def judgement(self, dtype):
        options = {n: x for n, x in self.inputs.items() if n not in ("out", "lse")}
        return gradients(**options, wrt=self.wrt, dtype=dtype)


def make(case: Case, *, dlse=True, wrt=None, dout="normal", seed=5) -> Problem:
    """A problem of a case. out and LSE are the reference's, rounded, so that no forward kernel has a part in it.

    dout: "normal", "none", "ones" (one element, strides 0) or an array. A case of operation=backward says dlse itself. Of a case
    of sequences dout is normal.
    """
    call = {}
    if case.lengths:
        made = sequence_gradients.arguments_of(case, dlse=case.dlse)
        call = {name: made.pop(name) for name in ("deterministic", "accumulate") if name in made}
        return Problem(case, made, wrt or case.wrt(), call)
    if case.operation == "backward":
        call, dlse = {"deterministic": case.deterministic, "accumulate": case.accumulate}, case.dlse
        case = dataclasses.replace(case, operation="attention", deterministic=True, accumulate=False, dlse=False)
    inputs = case.host_inputs()
    rng = np.random.default_rng([case.seed, seed])
    exact, exact_lse = reference.attention(**inputs)
    wide = np.float64 if case.dtype == "float64" else np.float32
    with np.errstate(over="ignore"):
        out, lse = exact.astype(dtype_of(case.dtype)), exact_lse.astype(wide)
    if isinstance(dout, str):
        draws = rng.standard_normal(exact.shape)
        ones = np.broadcast_to(np.ones((), dtype_of(case.dtype)), exact.shape)
        dout = {"normal": draws.astype(dtype_of(case.dtype)), "none": None, "ones": ones}[dout]
    if wrt is None:
        wrt = tuple(n for n in NAMES if n in inputs)
    made = {"dout": dout, "q": inputs.pop("q"), "k": inputs.pop("k"), "v": inputs.pop("v"), "out": out, "lse": lse, **inputs}
    if dlse is True:
        dlse = rng.standard_normal(lse.shape).astype(wide)
    if dlse is not False and dlse is not None:
        made["dlse"] = dlse
    return Problem(case, made, wrt, call)


def described(case: Case, **changes) -> dict:
    """Arguments of a call whose elements do not matter."""
    given = shapes_only(case)
    out = np.lib.stride_tricks.as_strided(given["q"], case.out_shape, given["q"].strides)
    lse = np.broadcast_to(np.zeros((), np.float32), (case.batch, case.heads, case.seq_q))
    return given | {"dout": out, "out": out, "lse": lse} | changes


@functools.cache
def taken(kernel: str, case: Case) -> bool:
    """Whether a kernel takes all gradients of a case, one for a device on an H200."""
    given = described(case)
    wrt = tuple(name for name in NAMES if name in given)
    device = None if runner.device_of(kernel) == "cpu" else DEVICES["h200"]
    return fa_ext.explain_backward(**given, wrt=wrt, device=device, kernel=kernel, **order(kernel))[0] is not None


def fit(case: Case, kernel: str) -> Case:
    """The case, or what is nearest to it that a kernel takes: in bfloat16, without bias and mask, with equal head_dims."""
    if runner.listed_name(kernel) in TAKES_EVERYTHING:
        return case
    dim = -(-max(case.head_dim, case.head_dim_v) // 8) * 8
    narrow = case.dtype if case.dtype == "float16" else "bfloat16"
    for change in ({}, {"dtype": narrow}, {"bias": None, "mask": None}, {"head_dim": dim, "head_dim_v": dim}, {"head_dim": 64, "head_dim_v": 64}):
        case = dataclasses.replace(case, **change)
        if taken(kernel, case):
            break
    return case


def placed(problem: Problem, kernel: str) -> dict:
    """The inputs on the kernel's device."""
    library = runner.library_for(kernel, problem.case)

    def put(x):
        if isinstance(x, tuple):
            return tuple(map(put, x))
        return place(x, library) if isinstance(x, np.ndarray) else x

    return {n: put(x) for n, x in problem.inputs.items()}


def results(problem: Problem, kernel: str, dtype=None):
    """({name: memory}, grads aligned with wrt): arrays filled with NaN, or wider ones of zeros where gradients are added to them,
    inside memory that is NaN too."""
    if problem.call.get("accumulate"):
        dtype = "float64" if problem.case.dtype == "float64" else "float32"
    library = runner.library_for(kernel, problem.case)
    memory, grads = {}, []
    for name in problem.wrt:
        like = problem.inputs[name]
        count = like.size
        memory[name] = runner.filled(library, count + 2 * _GUARD, dtype or like.dtype.name, np.nan)
        grads.append(memory[name][_GUARD : _GUARD + count].reshape(like.shape))
        if problem.call.get("accumulate"):
            grads[-1][...] = 0
    return memory, tuple(grads)


def run(kernel: str, problem: Problem, **extra) -> dict:
    """{name: gradient on the host}; fails where something around a result was written. Unplaceable where a kernel that need
    not take everything refuses the call."""
    memory, grads = results(problem, kernel)
    options = order(kernel) | problem.call | extra
    try:
        returned = fa_ext.attention_backward(**placed(problem, kernel), wrt=problem.wrt, grads=grads, kernel=kernel, **options)
    except fa_ext.UnsupportedError as error:
        if runner.listed_name(kernel) in TAKES_EVERYTHING:
            raise
        raise Unplaceable(str(error)) from None
    assert all(a is b for a, b in zip(returned, grads, strict=True))
    found = {}
    for name, held in memory.items():
        host = runner.to_host(held)
        shape = problem.inputs[name].shape
        count = math.prod(shape)
        assert np.isnan(np.concatenate((host[:_GUARD], host[_GUARD + count :])).astype(np.float32)).all(), f"beside d{name}"
        found[name] = host[_GUARD : _GUARD + count].reshape(shape)
    return found


def judged(kernel: str, problem: Problem, got: dict) -> BackwardReport:
    """The verdict of float64 on gradients."""
    inputs, case = problem.inputs, problem.case
    band = dict(layout=case.layout, causal=case.causal, window=case.window)
    arrays, exempt = [*(inputs[n] for n in ("dout", "q", "k", "v", "out", "lse")), inputs.get("dlse")], None
    per_pair = runner.listed_name(kernel) == "cpu_ref_backward"
    if case.lengths:
        exempt = None if per_pair else spread_sequences(problem.truth, *arrays, case.layout)
        return judge_sequences(got, problem.truth, problem.plain, case.dtype, case.layout, kernel=kernel, exempt=exempt)
    if not per_pair:
        exempt = spread_backward(problem.truth, *arrays, **band)
    zero = zeros_of(problem.truth, inputs["q"], inputs["k"], **band)
    return judge_backward(got, problem.truth, problem.plain, case.dtype, kernel=kernel, exempt=exempt, zero=zero)


def verdict(kernel: str, problem: Problem, **extra) -> BackwardReport:
    """Runs and judges; raises as run() does."""
    return judged(kernel, problem, run(kernel, problem, **extra))


def differences(loss, arrays, step=1e-5):
    """Central differences of a loss by every element of every array."""
    found = {}
    for name, x in arrays.items():
        found[name] = np.zeros_like(x)
        for index in np.ndindex(x.shape):
            kept = x[index]
            x[index] = kept + step
            above = loss()
            x[index] = kept - step
            found[name][index] = (above - loss()) / (2 * step)
            x[index] = kept
    return found


def shrunk(case: Case, factor: int) -> Case:
    """The case with a ``factor``-th of its sequence lengths, for kernels that take their time."""

    def small(length):
        return length if length < 8 else length // factor + 1

    return dataclasses.replace(case, seq_q=small(case.seq_q), seq_k=small(case.seq_k))


def contract(kernel: str) -> list[Case]:
    """The forward's contract with what a backward pass can be held to.

    A bias of finfo.min on whole rows is left out, since their LSE in float32 no longer holds how many keys they have, as are
    slopes that are as steep, and scales whose gradients exceed float32.
    """
    every = [case for case in cases.contract() if case.bias not in FLAT_BIASES and abs(case.scale or 1) < 1e9]
    special = [case for case in every if case.alibi and case.alibi != "steep" and runner.listed_name(kernel) in WITH_ALIBI]
    special += [case for case in every if case.dropout and runner.listed_name(kernel) in WITH_DROPOUT]
    special += [case for case in every if case.intervals and runner.listed_name(kernel) in WITH_INTERVALS]
    every = [case for case in every if not case.alibi and not case.dropout and not case.intervals]
    if runner.device_of(kernel) == "cuda":
        return [case for case in every + special if case.dtype != "float64"]
    if kernel == "cpu_simd_backward":
        return every + special
    some = random.Random(3).sample(every, 200) + special
    return [shrunk(case, 20 if case.seq_k > 2000 else 5) for case in some]


SEQUENCES = Case.sequences((3, 1), (5, 2), 2, 1, 64, dtype="float16", k="packed", causal="bottom_right", operation="backward")


@functools.cache
def takes_sequences(kernel: str, case: Case = SEQUENCES) -> bool:
    """Whether a kernel takes a call over sequences, one for a device on an H200."""
    given, device = make(case), None if runner.device_of(kernel) == "cpu" else DEVICES["h200"]
    options: dict = order(kernel) | given.call
    if options.get("accumulate"):
        options["grads"] = tuple(np.zeros_like(given.inputs[name]) for name in given.wrt)
    return fa_ext.explain_backward(**given.inputs, wrt=given.wrt, device=device, kernel=kernel, **options)[0] is not None


#: The options of a call with large scores, one after the other.
LARGE = [{}, {"causal": "bottom_right"}, {"sinks": "float32"}, {"sinks": "level"}, {"mask": "rows"}, {"window": (9, 5)}, {"softcap": 20.0},
         {"alibi": "level"}, {"heads_kv": 1}]  # fmt: skip
#: log2 of the scores up to which gradients are judged, and beyond which they are finite.
WITHIN = range(10, cases.LARGEST_BACKWARD + 1)
BEYOND = [exponent for exponent in magnitudes.EXPONENTS if exponent > cases.LARGEST_BACKWARD]


def large(kernel: str, kind: str, exponents, dtypes=("float16", "bfloat16", "float32")):
    """Problems with scores of a kind of ``magnitudes`` that the kernel may take; those whose gradients float16 does not hold, since
    its operands are some 6e4, are left out."""
    for n, (exponent, sign, dtype) in enumerate(itertools.product(exponents, (1, -1), dtypes)):
        options = {"heads_kv": 2} | LARGE[n % len(LARGE)]
        case = Case(1, 2, seq_q=37, seq_k=141, head_dim=64, dtype=dtype, logits=(kind, sign * exponent), seed=n, **options)
        if case.alibi and runner.listed_name(kernel) not in WITH_ALIBI:
            continue
        case = fit(case, kernel)
        if case.dtype != "float16" or exponent <= 24 and magnitudes.holds(kind, exponent, case.head_dim, case.dtype, 1 / 8):
            yield make(case)
