"""A kernel refuses each feature that it does not name: one allow-list, applied in one wording."""

import numpy as np
import pytest

import fa_ext
from bench.problems import cases
from bench.problems.case import Case
from fa_ext import _core
from tests.contract import max_logit, runner
from tests.contract.devices import DEVICES
from tests.library.support import stub

#: A call that asks for each feature alone. Bits as features.def counts them.
FEATURES = {
    "bias": dict(bias="full"),
    "boolean mask": dict(mask="full"),
    "sinks": dict(sinks="same"),
    "softcap": dict(softcap=5.0),
    "window to the left": dict(window=(3, None)),
    "head_dim of v other than q's": dict(head_dim_v=32),
    "ALiBi slopes": dict(alibi="heads"),
    "intervals": dict(intervals="full"),
    "dropout": dict(dropout=(0.1, 1)),
    "max_logit": {},
}
#: The first bit that means nothing yet.
NEXT_BIT = len(stub.features())
OF_FEW = {"ALiBi slopes": cases.WITH_ALIBI, "intervals": cases.WITH_INTERVALS, "dropout": cases.WITH_DROPOUT, "max_logit": max_logit.TAKES}
LACKS = {
    "minimal": ("bias", "boolean mask", "sinks", "softcap", "window to the left"),
    "wgmma_sm90": ("head_dim of v other than q's",),
    "wgmma_dropout_sm90": ("bias", "boolean mask", "softcap", "head_dim of v other than q's"),
    "wgmma_split_sm90": ("bias", "boolean mask", "head_dim of v other than q's"),
    "serve_sm90": ("bias", "boolean mask", "head_dim of v other than q's"),
    "prefill_sm90": ("bias", "boolean mask", "head_dim of v other than q's"),
    "packed_sm90": ("bias", "boolean mask", "head_dim of v other than q's"),
}


def answers(case, **extra):
    """{kernel: (answer, reason)} of every kernel of the build, each on the kind of device that it runs on."""
    found = {}
    for device in (None, DEVICES["h200"]):
        for kernel, (answer, reason, _) in _core.answers(**case.host_inputs(), **extra, device=device).items():
            if (runner.device_of(kernel) == "cpu") == (device is None):
                found[kernel] = answer, reason
    assert set(found) == set(fa_ext.kernels())
    return found


@runner.needs_every_instance
@pytest.mark.parametrize("bit", [NEXT_BIT, 31])
def test_a_feature_that_nobody_takes_is_refused_by_every_kernel_in_one_wording(bit):
    refused = answers(runner.SIMPLEST, features=1 << bit)
    assert {answer for answer, _ in refused.values()} == {"refuses"}
    assert len({reason for _, reason in refused.values()}) == 1
    assert len(refused) == len(fa_ext.kernels())
    assert [kernel for kernel, (answer, _) in answers(runner.SIMPLEST).items() if answer == "refuses"] == [
        kernel for kernel in fa_ext.kernels() if kernel in cases.OF_PACKED_QUERIES]  # fmt: skip


@runner.needs_every_instance
@pytest.mark.parametrize("feature", FEATURES)
def test_what_a_kernel_lacks(feature):
    case = Case(**{**dict(batch=1, heads=1, heads_kv=1, seq_q=64, seq_k=64, head_dim=64), **FEATURES[feature]})
    more = {"max_logit": np.zeros(1, np.float32)} if feature == "max_logit" else {}
    for kernel, (answer, reason) in answers(case, **more).items():
        lacks = feature in LACKS.get(kernel, ())
        if feature in OF_FEW:
            lacks = kernel not in OF_FEW[feature]
        if lacks:
            assert answer == "refuses" and reason == f"takes no {feature}", (kernel, reason)
        elif kernel in cases.OF_PACKED_QUERIES:
            assert answer == "refuses" and reason.startswith("takes packed queries alone"), reason
        else:
            assert answer in ("takes", "declines"), (kernel, reason)


def test_several_are_named_at_once():
    case = Case(1, 1, 1, 64, 64, 64, bias="full", mask="full", softcap=3.0)
    found = answers(case)
    if "minimal" in found:
        assert found["minimal"] == ("refuses", "takes no bias, no boolean mask and no softcap")


def test_a_dtype_that_is_not_named_is_refused():
    for kernel, (answer, reason) in answers(Case(1, 1, 1, 8, 8, 16, dtype="float32")).items():
        if kernel in ("wmma", "mma_sm80") or kernel.endswith("_sm90"):
            assert (answer, reason) == ("refuses", "takes float16 and bfloat16, not float32")
        else:
            assert answer in ("takes", "declines"), (kernel, reason)


def test_a_kernel_of_another_kind_of_device_says_so():
    array = np.zeros((1, 1, 4, 8), np.float32)
    for kernel, (answer, reason, _) in _core.answers(array, array, array).items():
        if runner.device_of(kernel) == "cuda":
            assert (answer, reason) == ("refuses", "runs on a CUDA device, the arrays are on the CPU")
    for kernel, (answer, reason, _) in _core.answers(array, array, array, device=DEVICES["h200"]).items():
        if runner.device_of(kernel) == "cpu":
            assert (answer, reason) == ("refuses", "runs on the CPU, the arrays are on a CUDA device")


def test_a_refusal_names_the_kernel_and_its_reason():
    """``runner.refusal_of`` reads it, and a call that names no kernel has none."""
    inputs = runner.SIMPLEST.host_inputs() | {"scale": 1e38}
    reasons = {kernel: reason for kernel, (answer, reason, _) in _core.answers(**inputs).items() if answer == "refuses"}
    assert reasons
    for kernel, reason in reasons.items():
        with pytest.raises(fa_ext.UnsupportedError) as raised:
            fa_ext.attention(**inputs, kernel=kernel)
        assert runner.refusal_of(raised.value) == (kernel, reason)
        assert not runner.is_left_out(raised.value)
    assert runner.refusal_of(fa_ext.UnsupportedError("no kernel takes this call: simt: takes no bias")) is None


@pytest.mark.parametrize("kernel, reason, is_left_out", [
    ("mma_sm80", runner.lacks_instance(), True), ("simt", runner.lacks_instance(), False), ("loaded", runner.lacks_instance(), True),
    ("mma_sm80@2", runner.lacks_instance(), True), ("mma_sm80", "takes no bias", False),
])  # fmt: skip
def test_only_an_instance_that_the_build_left_out_skips_a_test(monkeypatch, kernel, reason, is_left_out):
    """A kernel of which nothing was left out and that says so all the same is at fault."""
    built = {"kernels": {"mma_sm80": ("cuda", ""), "simt": ("cuda", "")}, "left_out": ["mma_sm80.d96_full_f16"]}
    monkeypatch.setattr(_core, "build_info", lambda: built)
    error = fa_ext.UnsupportedError(f'kernel "{kernel}" cannot take this call: {reason}')
    assert runner.is_left_out(error) is is_left_out
    assert not runner.is_left_out(fa_ext.UnsupportedError(f"no kernel takes this call: {kernel}: {reason}"))
