"""FlashAttention's own test files on ``fa_ext.torch.flash_attn``: a drawn sample of their parameter sets, which are half a million.

``python -m tests.frameworks.support.flash_attns_tests FOLDER`` prints how many sets passed, failed, were skipped by the files themselves
and were refused by fa_ext, by reason. FOLDER holds these files of FlashAttention's repository, unchanged: ``tests/test_flash_attn.py``
and of ``hopper/`` ``test_flash_attn.py``, ``test_util.py`` and ``padding.py``. A package that they import may lie there, too: ``einops``.
``--seed`` repeats a draw; ``--on cpu`` with ``--longest`` runs small sets without a GPU.
"""

import argparse
import collections
import os
import random
import re
import secrets
import sys
import tempfile
import time
import types
from pathlib import Path

import pytest

#: The name of a copy, and the file.
FILES = {
    "test_flash_attn_2.py": "tests/test_flash_attn.py",
    "test_flash_attn_3.py": "hopper/test_flash_attn.py",
    "test_util.py": "hopper/test_util.py",
    "padding.py": "hopper/padding.py",
}
#: Switches of FlashAttention's file for Hopper, for builds without a feature: fa_ext refuses 8-bit tensors.
VARIABLES = {"FLASH_ATTENTION_DISABLE_FP8": "TRUE"}
#: Changes in the copies, with the reason. Each text must be there.
CHANGES = {
    "test_flash_attn_2.py": {
        "from flash_attn.flash_attn_interface import _get_block_size_n, USE_TRITON_ROCM": (
            "USE_TRITON_ROCM = False", "names inside of FlashAttention, for the weights of dropout and for another vendor's build"
        ),
        "q_unpad,\n        k_unpad if paged_kv_block_size is None else": (
            "q_unpad.detach() if block_table is not None else q_unpad,\n        k_unpad if paged_kv_block_size is None else",
            "q of a call over pages requires grad, which fa_ext refuses before it computes",
        ),
        "for i in range(250):": ("for i in range(25):", "the time of a sample"),
    },
    "test_flash_attn_3.py": {
        "[torch.randint(1, seqlen_k * 2, (1,)).item(), 0]": ("[0]", "attention_chunk is refused; the rest of the same sets is not"),
        "[256, 512, d] if d <= 64": ("[256, d] if d <= 64", "head_dim of v over 256 is refused; the rest of the same sets is not"),
        "for i in range(1000):": ("for i in range(25):", "the time of a sample"),
        "torch.empty(70 * 1024 ** 3,": ("torch.empty(0,", "nobody says how much memory there is"),
    },
}  # fmt: skip
#: Tests that are not about the functions of the interface.
LEFT_OUT = {
    "test_flash_attn_generator_arg_must_be_none": "calls an extension inside of FlashAttention",
    "test_flash_attn_varlen_paged_kv_num_splits": "calls a function inside of FlashAttention",
    "test_flash3_bw_compatibility": "compares the schemas of FlashAttention's operators",
    "test_flash_attn_kvcache_paged_block_table_bounds": "wants a RuntimeError for bad lengths, which fa_ext counts (fa_ext.faults)",
}
#: Messages of NotImplementedError with which fa_ext refuses a set, and what they refuse.
REFUSED = {
    r"return_attn_probs is True with dropout_p > 0": "the weights of dropout",
    r"^qv is given": "qv",
    r"cache_leftpad is given with rotary_cos": "cache_leftpad with rotary",
}
#: Gradients of q and k where each sequence has one key: the difference of two sums of the same products, in two orders.
ROUNDING = 1e-5


def exception(error):
    """Why a set may fail by this exception, or None."""
    if isinstance(error, NotImplementedError):
        return next((f"refused: {what}" for pattern, what in REFUSED.items() if re.search(pattern, str(error))), None)
    exact = re.match(r"assert (\S+) <= \(\([23] \* 0\.0\) \+ 0\.0\)\n", str(error)) if isinstance(error, AssertionError) else None
    if exact and float(exact[1]) <= ROUNDING:
        return f"the file wants exactly 0, and finds at most {ROUNDING:g}"
    return None


def copy(folder, to, device):
    """The files of ``folder`` with their changes in ``to``, for the tests of this device."""
    for name, file in FILES.items():
        text = (folder / file).read_text(encoding="utf-8")
        for old, (new, _) in CHANGES.get(name, {}).items():
            if old not in text:
                raise SystemExit(f"{file} has no {old!r}: the files are of another version than CHANGES")
            text = text.replace(old, new)
        (to / name).write_text(text.replace('"cuda"', f'"{device}"'), encoding="utf-8")


def drawn(marks, count, longest, generator):
    """(names, sets) of at most ``count`` parameter sets of a test, none twice, none with an integer over ``longest``."""
    names = [[name.strip() for name in m.args[0].split(",")] if isinstance(m.args[0], str) else list(m.args[0]) for m in marks]
    values = [m.args[1] for m in marks]
    total = 1
    for x in values:
        total *= len(x)
    sets = []
    for number in generator.sample(range(total), min(total, count * 1000 if longest else count)):
        one = []
        for some, x in zip(names, values, strict=True):
            number, i = divmod(number, len(x))
            one += x[i] if len(some) > 1 else [x[i]]
        if len(sets) < count and not (longest and any(isinstance(x, int) and x > longest for x in one)):
            sets.append(tuple(one))
    return [name for some in names for name in some], sets


class Sample:
    """The plugin of pytest: draws sets, turns exceptions with a reason into expected failures, stops in time, counts."""

    def __init__(self, args):
        self.args, self.generator, self.end = args, random.Random(args.seed), time.monotonic() + args.seconds
        self.drawn, self.outcomes = 0, collections.Counter()

    @pytest.hookimpl(tryfirst=True)
    def pytest_generate_tests(self, metafunc):
        marks = list(metafunc.definition.iter_markers("parametrize"))
        metafunc.definition.own_markers[:] = [m for m in metafunc.definition.own_markers if m.name != "parametrize"]
        if marks:
            names, sets = drawn(marks, self.args.draw, self.args.longest, self.generator)
            metafunc.parametrize(names, sets)

    def pytest_collection_modifyitems(self, config, items):
        left_out = [item for item in items if item.originalname in LEFT_OUT]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.originalname not in LEFT_OUT]
        self.generator.shuffle(items)
        self.drawn = len(items)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        try:
            return (yield)
        except (NotImplementedError, AssertionError) as error:
            if why := exception(error):
                pytest.xfail(why)
            raise

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or not report.passed and report.when == "setup":
            self.outcomes[getattr(report, "wasxfail", None) or report.outcome] += 1

    def pytest_runtest_logfinish(self, nodeid):
        if time.monotonic() > self.end:
            pytest.exit(f"{self.args.seconds} s are over", returncode=0)

    def pytest_terminal_summary(self, terminalreporter):
        write = terminalreporter.write_line
        write(f"FlashAttention's tests, seed {self.args.seed}: {sum(self.outcomes.values())} of {self.drawn} drawn sets ran")
        for outcome, count in sorted(self.outcomes.items()):
            write(f"  {count:5} {outcome}")
        for test, reason in LEFT_OUT.items():
            write(f"  not drawn: {test} ({reason})")
        for name, changes in CHANGES.items():
            for old, (new, reason) in changes.items():
                write(f"  changed in {FILES[name]}: {old!r} is {new!r} ({reason})")
        write(f"  left out by {', '.join(VARIABLES)}: 8-bit tensors")


def stand_in_for_cuda():
    """Answers to all that the files ask of a GPU as they are imported."""
    import torch

    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.get_device_properties = lambda device=None: types.SimpleNamespace(total_memory=2**40)


def arguments():
    parser = argparse.ArgumentParser(prog="python -m tests.frameworks.support.flash_attns_tests", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="FlashAttention's files")
    parser.add_argument("--draw", type=int, default=90, help="sets of a test at most: 90 are some 1,500 in all")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--on", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--longest", type=int, help="leave out sets with a larger number")
    parser.add_argument("-k", default="", help="pytest's -k")
    return parser.parse_args()


def main():
    args = arguments()
    os.environ.update(VARIABLES)
    if args.on == "cpu":
        stand_in_for_cuda()
    import fa_ext.torch.flash_attn

    fa_ext.torch.flash_attn.install()
    with tempfile.TemporaryDirectory() as place:
        copy(args.folder, Path(place), args.on)
        sys.path[:0] = [place, str(args.folder.resolve())]
        options = ["-q", "-p", "no:cacheprovider", "--rootdir", place, "--tb=short", "--show-capture=no", "-k", args.k]
        tests = [str(Path(place) / name) for name in FILES if name.startswith("test_flash")]
        sample = Sample(args)
        done = pytest.main([*options, *tests], plugins=[sample])
        return done or bool(sample.outcomes["failed"])  # where time is over, pytest's own code does not say so


if __name__ == "__main__":
    sys.exit(main())
