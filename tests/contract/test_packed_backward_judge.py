"""Mistakes in gradients of sequences that the verifier must notice: an emulation passes, and fails with each of them."""

import numpy as np
import pytest

import fa_ext
from bench.problems import stored
from bench.problems.case import Case
from fa_ext.judge.backward import judge_sequences
from fa_ext.reference.backward import gradients
from tests.contract.sequence_gradients import alone, arguments_of, rows_of, values_of

WRT = ("q", "k", "v", "sinks")
BASE = Case.sequences((1, 7, 0, 34), (5, 9, 4, 40), 4, 2, 16, dtype="float32", k="packed", causal="bottom_right", sinks=True, alibi="heads", softcap=4.0,
                      slack=3, operation="backward", dlse=True)  # fmt: skip
#: The fields that a mistake needs beside the case above.
NEEDS = {"positions ignored": {"positions": "shifted"}, "k_range ignored": {"k_range": True, "seed": 1}, "dropout counted in the stream": {"dropout": (0.4, 3)},
         "diagonal of the padded room": {"q": "padded", "k": "padded"}, "lengths ignored": {"q": "padded", "k": "padded"}}  # fmt: skip
MISTAKES = [
    "neighbour's first key seen", "last row dropped", "top_left", "delta of another sequence", "LSE off by one", "tail added to the next",
    "short sequences zeroed", "rows of no sequence left", "dsinks of one sequence", "dk of one head", "dlse left out",
    "hidden keys get something", "small error in a small sequence", *NEEDS,
]  # fmt: skip


def differentiated(x, group, other=None):
    """(dq, dk, dv, dsinks) of a dense call of one sequence in float64, (H, S, D), from the rounded out and LSE, as a kernel finds
    them. other: delta, where it is another's."""
    q, k, v, dout, out, lse, dlse = (x[name][0].astype(np.float64) for name in ("q", "k", "v", "dout", "out", "lse", "dlse"))
    k, v = (np.repeat(a, group, axis=0) for a in (k, v))
    scale, cap = q.shape[-1] ** -0.5, x["softcap"]
    c = cap * np.tanh(scale * q @ k.swapaxes(1, 2) / cap)
    seen = np.broadcast_to(x["mask"][0], c.shape)
    p = np.where(seen, np.exp(np.where(seen, c + x["bias"][0], 0) - lse[..., None]), 0)
    w = np.ones_like(p)
    if "dropout" in x:
        drawn = x["dropout"]
        keep = fa_ext.dropout_keep(drawn[3][0] + 1, len(q), drawn[3][2] + len(q[0]), drawn[3][3] + len(k[0]), (*drawn[:3], (0, 0, 0, 0), drawn[4]))
        w = keep[drawn[3][0], :, drawn[3][2] :, drawn[3][3] :] / (1 - int(65536 * drawn[0] + 0.5) / 65536)
    delta = np.where(seen.any(axis=-1), (dout * out).sum(axis=-1), 0) - dlse if other is None else other
    dt = p * (w * (dout @ v.swapaxes(1, 2)) - delta[..., None]) * (1 - (c / cap) ** 2)
    dk, dv = scale * dt.swapaxes(1, 2) @ q, (p * w).swapaxes(1, 2) @ dout
    return scale * dt @ k, grouped(dk, group), grouped(dv, group), -(np.exp(x["sinks"][:, None] - lse) * delta).sum(axis=-1)


def grouped(x, group):
    return x.reshape(-1, group, *x.shape[1:]).sum(axis=1)


def emulated(case, mistake=None):
    """(arguments, gradients in the storage of the case) by the emulation, with a mistake or without."""
    values, group = values_of(case), case.heads // case.heads_kv
    arguments = arguments_of(case, values)
    outside = 1.0 if mistake == "rows of no sequence left" else 0.0
    got = {name: np.full(arguments[name].shape, outside) for name in "qkv"} | {"sinks": np.zeros(case.heads)}
    found = []
    for b in range(len(values)):
        wrong = case
        if mistake == "top_left":
            wrong = case.changed(causal="top_left")
        if mistake == "positions ignored":
            wrong = case.changed(positions=None)
        if mistake == "k_range ignored":
            wrong = case.changed(k_range=False)
        found.append(list(differentiated(mistaken(case, values, b, mistake, alone(wrong, values, b)), group, other_delta(values, b, mistake))))
    spoiled(case, found, group, mistake)
    for b, parts in enumerate(found):
        for name, part in zip("qkv", parts, strict=False):
            rows_of(case, arguments, name, got[name], b)[...] = part.swapaxes(0, 1)[: len(getattr(values[b], name))]
        got["sinks"] += parts[3] if mistake != "dsinks of one sequence" or b == 3 else 0
    if mistake == "hidden keys get something":
        rows_of(case, arguments, "k", got["k"], 2)[0, 0, 0] = 1e-30
    if mistake == "small error in a small sequence":
        rows_of(case, arguments, "q", got["q"], 0)[...] *= 1 + 1e-3
    return arguments, {name: x.astype(np.float32) for name, x in got.items()}


def other_delta(values, b, mistake):
    if mistake != "delta of another sequence" or not len(values[b].q):
        return None
    every = np.concatenate([(x.dout.astype(float) * x.out).sum(axis=-1) - x.dlse for x in values])
    first = sum(len(x.q) for x in values[:b])
    return np.roll(every, 1, axis=0)[first : first + len(values[b].q)].T if b == 1 else None


def mistaken(case, values, b, mistake, x):
    """The arguments of a sequence's dense call, with what the mistake makes of them."""
    n_q, n_k = case.n_q[b], case.n_k[b]
    if mistake == "neighbour's first key seen" and b == 1:
        for name, next_one in (("k", values[3].k), ("v", values[3].v)):
            x[name] = np.concatenate([x[name], next_one[:1].swapaxes(0, 1)[None]], axis=2)
        x["mask"] = np.pad(x["mask"], ((0, 0), (0, 0), (0, 0), (0, 1)))
        x["mask"][..., -1, -1] = True
        x["bias"] = np.pad(x["bias"], ((0, 0), (0, 0), (0, 0), (0, 1)))
    if mistake == "last row dropped" and n_q == 34:
        x["mask"] = x["mask"] & (np.arange(n_q) < 33)[:, None]
    if mistake == "LSE off by one":
        x["lse"] = np.roll(x["lse"], 1, axis=-1)
    if mistake == "dlse left out":
        x["dlse"] = np.zeros_like(x["dlse"])
    if mistake == "diagonal of the padded room":
        room = max(case.n_k) - max(case.n_q)
        x["mask"] = (np.arange(n_k) - (np.arange(n_q)[:, None] + room) <= 0)[None, None]
    if mistake == "lengths ignored" and b == 1:
        for name in ("k", "v"):
            x[name] = np.pad(x[name], ((0, 0), (0, 0), (0, 1), (0, 0)), constant_values=0.5)
        x["mask"], x["bias"] = (np.pad(x[n], ((0, 0), (0, 0), (0, 0), (0, 1)), constant_values=fill) for n, fill in (("mask", True), ("bias", 0)))
    if mistake == "dropout counted in the stream":
        x["dropout"] = (*x["dropout"][:3], (0, 0, sum(case.n_q[:b]), sum(case.n_k[:b])), case.heads)
    return x


def spoiled(case, found, group, mistake):
    """Mistakes in what was found."""
    if mistake == "tail added to the next":
        found[3][1][:, 0] += found[1][1][:, -1]
    if mistake == "short sequences zeroed":
        found[0][0][...] = 0
    if mistake == "dk of one head":
        found[1][1] /= group


def report_on(case, mistake=None):
    arguments, got = emulated(case, mistake)
    options = {n: x for n, x in arguments.items() if n not in ("out", "lse")}
    truth, plain = (gradients(**options, wrt=WRT, dtype=dtype) for dtype in (None, "float32"))
    return judge_sequences(got, truth, plain, "float32", case.layout)


@pytest.mark.parametrize("changes", [{}, *NEEDS.values()], ids=str)
def test_the_emulation_without_a_mistake_passes(changes):
    report = report_on(BASE.changed(**changes))
    assert report, report


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_verifier_notices(mistake):
    assert not report_on(BASE.changed(**NEEDS.get(mistake, {})), mistake)


def test_an_error_does_not_hide_behind_a_longer_sequence():
    """Of the whole call it is a small one."""
    case = BASE.changed(n_q=(2, 60), n_k=(2, 60), alibi=None)
    assert stored.query_positions(case) is None
    values = values_of(case)
    values[0].dout[...] *= 1e-4
    values[0].dlse[...] *= 1e-4
    arguments = arguments_of(case, values)
    options = {n: x for n, x in arguments.items() if n not in ("out", "lse")}
    truth, plain = (gradients(**options, wrt=WRT, dtype=dtype) for dtype in (None, "float32"))
    for name in "qkv":
        got = {n: x.astype(np.float32) for n, x in truth.items()}
        rows_of(case, arguments, name, got[name], 0)[...] *= 1 + 1e-3
        report = judge_sequences(got, truth, plain, "float32", case.layout)
        failures = [failure for g in report.gradients for failure in g.failures]
        assert failures and all(failure.startswith("sequence 0: ") for failure in failures), report


@pytest.mark.parametrize("name", ["q", "k", "v", "sinks"])
def test_one_element_that_is_not_written_is_noticed(name):
    arguments, got = emulated(BASE)
    options = {n: x for n, x in arguments.items() if n not in ("out", "lse")}
    truth, plain = (gradients(**options, wrt=WRT, dtype=dtype) for dtype in (None, "float32"))
    got[name].flat[-1] = np.nan
    assert not judge_sequences(got, truth, plain, "float32", BASE.layout)


def test_a_kernel_that_forgets_is_noticed(monkeypatch):
    """verify_backward poisons results, in rows of no sequence too."""
    arguments = arguments_of(BASE)
    assert fa_ext.verify_backward(**arguments, wrt=WRT)
    whole = fa_ext.attention_backward

    def forgetful(*args, grads, **options):
        found = whole(*args, **options)
        for g, x in zip(grads, found, strict=True):
            g[...] = np.where(x == 0, g, x)
        return grads

    monkeypatch.setattr(fa_ext, "attention_backward", forgetful)
    assert not fa_ext.verify_backward(**arguments, wrt=WRT)
