"""The judge of gradients of sequences: against differences, and against a dense call of each sequence."""

import itertools

import numpy as np
import pytest

import fa_ext
from bench.problems.case import Case
from bench.problems.serving_cases import grid, lengths, random_cases
from fa_ext import reference
from fa_ext.reference.backward import gradients, plain_backward
from tests.contract import sequence_gradients
from tests.contract.gradients import differences
from tests.contract.sequence_gradients import K_STORAGE, alone, arguments_of, elsewhere, parts_of, values_of


def truth_of(arguments, **changes):
    return gradients(**{n: x for n, x in arguments.items() if n not in ("out", "lse")} | changes)


def everything(q, k, layout, positions):
    """A small float64 case with every option at once."""
    n_q = (1, 0, 1) if q == "one" else (2, 0, 3)
    return Case.sequences(
        n_q, (3, 2, 4), 2, 1, 2, 2, "float64", q, k, layout, slack=1, causal="bottom_right", window=(2, None), softcap=2.0, scale=0.7,
        sinks=True, alibi="batch", k_range=True, positions=positions, seed=2, dropout=(0.4, 3),
    )  # fmt: skip


@pytest.mark.parametrize(("q", "k", "layout", "positions"), [
    ("packed", "packed", "bshd", None), ("packed", "padded", "bhsd", "shifted"), ("padded", "packed", "bhsd", "random"), ("one", "padded", "bshd", None),
])  # fmt: skip
def test_gradients_are_those_of_finite_differences(q, k, layout, positions):
    case = everything(q, k, layout, positions)
    arguments = arguments_of(case)
    weights = {name: np.nan_to_num(arguments[name]) for name in ("dout", "dlse")}
    given = {n: x for n, x in arguments.items() if n not in ("dout", "dlse", "out", "lse")}
    arrays = {name: np.nan_to_num(given[name]).astype(np.float64) for name in ("q", "k", "v", "sinks")}

    def loss():
        out, lse = reference.attention(**given | arrays)
        return float((out * weights["dout"]).sum() + (np.where(np.isfinite(lse), lse, 0) * weights["dlse"]).sum())

    want, found = differences(loss, arrays), truth_of(arguments, wrt=tuple(arrays))
    for name in arrays:
        np.testing.assert_allclose(found[name], want[name], atol=1e-8, rtol=0)
        assert abs(want[name]).max() > 1e-3
        if name in "qkv":
            assert (elsewhere(case, arguments, name, found[name]) == 0).all()


@pytest.mark.parametrize("shape", [(3, 2, 4, 5), (1, 1, 1, 5), (3, 1, 4, 1), (5,)])
def test_gradients_of_a_bias(shape):
    """Of padded arrays: sums over the pairs that exist, 0 elsewhere."""
    case = everything("padded", "padded", "bhsd", "shifted")
    arguments = arguments_of(case)
    arguments["mask"] = np.random.default_rng(0).random((3, 1, 1, 5)) < 0.7
    given = {n: x for n, x in arguments.items() if n not in ("dout", "dlse", "out", "lse")}
    arrays = {"bias": np.random.default_rng(1).standard_normal(shape)}

    def loss():
        out, lse = reference.attention(**given | arrays)
        weights = np.nan_to_num(arguments["dout"]), np.nan_to_num(arguments["dlse"])
        return float((out * weights[0]).sum() + (np.where(np.isfinite(lse), lse, 0) * weights[1]).sum())

    want, found = differences(loss, arrays)["bias"], truth_of(arguments, **arrays, wrt=("bias",))["bias"]
    np.testing.assert_allclose(found, want, atol=1e-8, rtol=0)
    assert found.shape == shape and (found == 0).sum() == (want == 0).sum()


CASES = [case for case in (*grid(), *lengths(), *random_cases(60)) if case.storage.k != "paged"]
CASES = [case for case in CASES if sum(a * b for a, b in zip(case.n_q, case.n_k)) * case.heads < 60_000 and len(case.n_q) < 60]


@pytest.mark.parametrize("part", range(4))
def test_a_sequence_has_the_gradients_of_its_dense_call(part):
    for n, case in enumerate(CASES[part::4]):
        case = case.changed(dropout=(0.3, n) if n % 3 == 0 else None)
        values = values_of(case)
        arguments = arguments_of(case, values)
        wrt = ("q", "k", "v", *(["sinks"] if case.sinks else []))
        found = truth_of(arguments, wrt=wrt)
        sinks = np.zeros(case.heads)
        for b, got in enumerate(parts_of(case, arguments, found)):
            want = truth_of(alone(case, values, b), wrt=wrt)
            for name in "qkv":
                np.testing.assert_allclose(got[name].swapaxes(0, 1)[None], want[name], rtol=1e-9, atol=1e-11, err_msg=f"{case} {b} {name}")
            sinks += want["sinks"] if case.sinks else 0
        for name in "qkv":
            assert found[name].shape == arguments[name].shape and (elsewhere(case, arguments, name, found[name]) == 0).all()
        if case.sinks:
            np.testing.assert_allclose(found["sinks"], sinks, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_plain_is_about_as_far_off_as_the_dtype_says(dtype):
    case = Case.sequences((5, 0, 30, 1), (9, 4, 70, 1), 4, 2, 16, dtype=dtype, k="packed", sinks=True, softcap=5.0, alibi="heads", dropout=(0.2, 1))
    arguments = arguments_of(case)
    given = {n: x for n, x in arguments.items() if n not in ("out", "lse")}
    wrt = ("q", "k", "v", "sinks")
    truth = gradients(**given, wrt=wrt)
    eps = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-20, "float64": 2.0**-45}[dtype]
    for name, got in zip(wrt, plain_backward(**given, wrt=wrt), strict=True):
        error = abs(got - truth[name]).max() / abs(truth[name]).max()
        assert error < 8 * eps and (error > 0 or dtype == "float64")


def test_dropout_draws_one_mask_for_packed_padded_and_dense():
    """With values that are an identity, out holds the weights, and dv those that were kept."""
    seed = (0.5, 11, 2, (1, 0, 5, 9), 7)
    n_q, n_k, longest = (3, 0, 17, 8), (5, 2, 30, 16), 30
    keep = fa_ext.dropout_keep(4, 2, 17, longest, seed)
    for q, k in itertools.product(("packed", "padded"), K_STORAGE):
        case = Case.sequences(n_q, n_k, 2, 2, 4, longest, "float64", q, k, layout="bshd", causal="bottom_right", window=(9, None))
        values = sequence_gradients.values_of(case)
        for x in values:
            x.v[...] = np.eye(len(x.v), longest)[:, None, :]
        arguments = arguments_of(case, values) | {"dropout": seed}
        given = {n: x for n, x in arguments.items() if n not in ("dout", "out", "lse", "dlse")}
        out, _ = reference.attention(**given)
        whole, _ = reference.attention(**given | {"dropout": None})
        for b, n in enumerate(n_q):
            weights = sequence_gradients.rows_of(case, arguments, "out", out, b).swapaxes(0, 1)
            seen = sequence_gradients.rows_of(case, arguments, "out", whole, b).swapaxes(0, 1) > 0
            assert ((weights > 0) == seen & keep[b, :, :n])[..., : n_k[b]].all()


def test_pages_have_no_gradients():
    given = Case.sequences().host_inputs()
    with pytest.raises(ValueError, match="page_table has no backward: gradients would go into pages that sequences share; gather the keys"):
        gradients(given["q"], **given)
