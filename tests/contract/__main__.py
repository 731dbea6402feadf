"""One case, or a sweep of random ones, on a kernel. ``str(case)`` names a case in one line, and the line runs it again::

    python -m tests.contract "B1,H4/2,S113x203,D64,bfloat16,causal=top_left,mask=rows" --kernel simt --on cupy
    python -m tests.contract "B3,H4/2,S1x300*2+7x90,D64,float16,q=packed,k=paged,causal=bottom_right" --kernel cpu_simd
    python -m tests.contract --sweep 1000 --seed 7 --kernel simt
    python -m tests.contract --sweep 1000 --sequences --kernel simt_backward
"""

from __future__ import annotations

import argparse
import collections
import itertools
import sys
import time

import fa_ext
from bench.problems import cases, serving_cases
from bench.problems.case import Case
from bench.problems.placement import Unplaceable
from tests.contract import gradients, runner


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.contract", description="Runs one case, or a sweep of random ones, and judges it by float64.")
    parser.add_argument("case", nargs="?", help="the name of a case, as the tests print it")
    parser.add_argument("--kernel", help="kernel to force; default: the library's choice")
    parser.add_argument("--on", default="numpy", choices=("numpy", "cupy", "torch"), help="library of a case's arrays")
    parser.add_argument("--load", help="shared library of a kernel that was built alone; becomes the kernel to force")
    parser.add_argument("--sweep", type=int, default=0, help="this many random cases on the kernel instead")
    parser.add_argument("--sequences", action="store_true", help="the sweep draws sequences of any length")
    parser.add_argument("--seed", type=int, default=0, help="of the sweep")
    parser.add_argument("--limit", type=float, default=1e8, help="FLOPs of a sweep's largest case")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="a sweep begins no new case after these")
    given = parser.parse_args(arguments)
    kernel = fa_ext._core.load(given.load) if given.load else given.kernel
    if given.sweep:
        backward = kernel and kernel.partition("@")[0] in fa_ext.kernels("backward")
        if given.sequences:
            drawn = (serving_cases.random_gradients if backward else serving_cases.random_cases)(given.sweep, given.seed)
            parted = serving_cases.random_segments(given.sweep // 10, given.seed, backward)
            drawn = itertools.chain(drawn, parted)
        else:
            drawn = (cases.random_gradients if backward else cases.random_cases)(given.seed, given.sweep, given.limit)
        return sweep(kernel or fa_ext.kernels()[-1], drawn, given.seconds)
    if not given.case:
        parser.error("give the name of a case, or --sweep N")
    try:
        case = Case.parse(given.case)
    except ValueError as error:
        parser.error(f"case is {given.case!r}: {error}")
    if case.operation not in ("attention", "serving", "backward"):
        parser.error(f"case is {given.case!r}; accepted are attention and its backward pass, with sequences or without")
    if case.operation == "backward":
        report = _verdict(kernel or fa_ext.kernels("backward")[-1], case)
    elif case.exact and not case.lengths:
        report = _verdict(kernel or fa_ext.kernels()[-1], case)
    else:
        report = fa_ext.verify(**case.make_inputs(given.on), kernel=kernel)
    print(report)
    return 0 if report else 1


def _verdict(kernel: str, case: Case):
    """The verdict of float64 on a kernel's results of a case of either pass, in arrays of the library that there is for it."""
    if case.operation == "attention":
        return runner.verdict(kernel, case)
    if case.operation == "serving":
        return fa_ext.verify(**case.make_inputs(runner.library_for(kernel, case)), kernel=kernel)
    return gradients.verdict(kernel, gradients.make(case))


def sweep(kernel: str, problems, seconds: float) -> int:
    """Judges ``problems`` on a kernel; prints each failure with the line that runs it again, and at last the counts."""
    judged = failed = 0
    refusals: collections.Counter = collections.Counter()
    ends = time.monotonic() + seconds
    for case in problems:
        if time.monotonic() > ends:
            break
        try:
            report = _verdict(kernel, case)
            judged += 1
            failed += not report
            found = "" if report else str(report)
        except Unplaceable as error:
            refusals[str(error)] += 1
            found = ""
        except fa_ext.UnsupportedError as error:
            refusals[str(error)] += 1
            held = not case.lengths and cases.must_accept(runner.listed_name(kernel), case)
            found = f"must accept, but: {error}" if held else ""
            failed += bool(found)
        except (AssertionError, RuntimeError, ValueError, BufferError) as error:
            failed += 1
            found = repr(error)
        if found:
            print(
                f'{found}\n  python -m tests.contract "{case}" --kernel {kernel} --on {runner.library_for(kernel, case)}',
                flush=True,
            )
    print(f"{kernel}: {judged} judged, {failed} failed, {refusals.total()} not taken")
    for reason, count in refusals.most_common():
        print(f"  {count} {reason}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
