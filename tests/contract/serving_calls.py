"""Calls over sequences as several test files make them: results of poisoned outputs, a sequence's part of them."""

import contextlib

import numpy as np

import fa_ext
from bench.problems.placement import Unplaceable, place
from fa_ext import reference
from fa_ext.judge import judge
from tests.contract import runner
from tests.contract.runner import library_of as library
from tests.contract.runner import on


def adapted(kernel, case):
    """The case, in a dtype that the kernel takes: float64 where it is asked for, and where another is missing float16."""
    return case if case.dtype == "float64" or runner.has_dtype(kernel, case.dtype) else case.changed(dtype="float16")


#: Kernels that take a part of what sequences may come with; the others take everything.
PARTIAL = {"packed_sm90", "serve_sm90", "prefill_sm90"}


@contextlib.contextmanager
def taken(kernel):
    """A call that a kernel of `PARTIAL` refuses is Unplaceable, which skips a test."""
    try:
        yield
    except fa_ext.UnsupportedError as error:
        raise (Unplaceable(str(error)) if runner.listed_name(kernel) in PARTIAL else error) from None


def verify(kernel, arguments, **options):
    """The report on the call."""
    with taken(kernel):
        return fa_ext.verify(**on(kernel, arguments), kernel=kernel, **options)


def attend(kernel, arguments, **options):
    """(out, lse) on the host, from outputs that were poisoned."""
    q, v = arguments["q"], arguments["v"]
    heads_first = q.ndim == 4 and arguments.get("layout") != "bshd"
    shape = q.shape[1::-1] if q.ndim == 3 else q.shape[:3] if heads_first else (q.shape[0], q.shape[2], q.shape[1])
    out = place(np.full((*q.shape[:-1], v.shape[-1]), np.nan, q.dtype), library(kernel))
    lse = place(np.full(shape, np.nan, "f8" if q.dtype == np.float64 else "f4"), library(kernel))
    with taken(kernel):
        fa_ext.attention(**on(kernel, arguments), out=(out, lse), kernel=kernel, **options)
    return runner.to_host(out), runner.to_host(lse)


def exact_verdict(kernel, case):
    """The report on a case with large scores, by a bound that knows them as float32 has them."""
    arguments = case.host_inputs()
    exact = case.softcap == 0
    out, lse = attend(kernel, arguments)
    truth, plain = reference.attention(**arguments), reference.plain(**arguments, exact=exact)
    layout = "bshd" if out.ndim == 3 else case.layout
    if out.ndim == 3:
        out, lse, truth, plain = out[None], lse[None], tuple(x[None] for x in truth), tuple(x[None] for x in plain)
    return judge(out, lse, truth, plain, case.dtype, layout=layout, kernel=kernel)


def parts_of(case, arguments, out, lse):
    """[(out, lse)] of each sequence, (n_q, H, Dv) and (n_q, H), out of a result in whatever storage."""
    found = []
    for b, n in enumerate(case.n_q):
        if arguments["q"].ndim == 3:
            first = b if case.storage.q == "one" else int(arguments["cu_seqlens_q"][b])
            found.append((out[first : first + n], lse[:, first : first + n].T))
        else:
            mine = out[b] if case.layout == "bshd" else out[b].swapaxes(0, 1)
            found.append((mine[:n], lse[b, :, :n].T))
    return found


def same_bits(a, b):
    return all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


def assert_keeps_a_promise(kernel, case, counted):
    """``max_seqlen_q`` of packed queries: one that holds changes no bit, and one that does not is a length over its capacity, which
    leaves the neighbours as they are. ``counted()`` returns and forgets the faults of the kernel."""
    arguments, longest = case.host_inputs(), max(case.n_q)
    whole = attend(kernel, arguments)
    counted()
    for most in (longest, longest + 1, np.int64(longest), 10**30):
        assert same_bits(attend(kernel, arguments, max_seqlen_q=most, check=True), whole), most
    assert counted() == []
    parts, starts = parts_of(case, arguments, *whole), arguments["cu_seqlens_q"]
    for most in sorted({0, 1, longest // 2, longest - 1} - {longest}):
        broken = attend(kernel, arguments, max_seqlen_q=most, check=False)
        over = [(b, n) for b, n in enumerate(case.n_q) if n > most]
        met = counted()
        assert [(kind, count) for kind, count, *_ in met] == [("length", len(over))]
        assert met[0][2:] in [(b, 0, n) for b, n in over]
        for b, n in enumerate(case.n_q):
            rows = slice(int(starts[b]), int(starts[b]) + n)
            if n <= most:
                assert same_bits((broken[0][rows], broken[1][:, rows].T), parts[b]), (most, b)
            assert not broken[0][rows][most:].any() and (broken[1][:, rows][:, most:] == -np.inf).all(), (most, b)
        # A sequence that is cut is one that uses fewer of its rows.
        fewer = attend(kernel, arguments | {"seqlens_q": np.minimum(case.n_q, most).astype(np.int32)})
        assert same_bits(broken, fewer), most


def assert_counts_as_the_reference(kernel, met, arguments):
    """Index arrays with bad contents: results against float64, and the kinds of faults that cpu_ref counts. ``met()`` returns and
    forgets the faults of the kernel, which an emulated one counts by itself."""
    for name in "qkv":
        arguments[name] = np.nan_to_num(arguments[name], nan=0.5)  # what is bad may let see what nobody should
    fa_ext.faults(None)
    fa_ext.attention(**arguments, kernel="cpu_ref", check=False)
    wanted = fa_ext.faults(None)
    met()
    report = fa_ext.verify(**arguments, kernel=kernel, check=False)
    assert report, report
    found = met()
    fa_ext.faults(None)
    assert [x[:2] for x in found] == [x[:2] for x in wanted]  # and one of them, not always the first
