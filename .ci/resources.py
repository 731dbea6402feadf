"""Reads ptxas' resource reports that the build keeps beside its objects; fails on spills, on serialised wgmma and on more
functions than the budget of the build has (fa_ext/_sets.py).

    python .ci/resources.py build/objects     prints a table of every kernel; exit status 1 on a finding

``.ci/resources.allow`` excuses single findings, one a line: ``<regex of the mangled kernel name> <bytes> <reason>``.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fa_ext"))
import _build

# wgmma serialised (C7510-C7512, C7514, C7515), waits injected (C7517), setmaxnreg ignored (C7508).
SERIALISED = re.compile(r"C75(?:08|1[0-9])")
ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")


def allowed(name, size, rules):
    return any(re.search(pattern, name) and size <= limit for pattern, limit, _ in rules)


def read_rules(path):
    rules = []
    for line in path.read_text().splitlines() if path.exists() else []:
        if line.strip() and not line.startswith("#"):
            pattern, limit, reason = line.split(None, 2)
            rules.append((pattern, int(limit), reason))
    return rules


def kernels(text):
    """(name, arch, stack bytes, spill bytes, registers) of each kernel in one compiler log."""
    entry, stack, spill = None, 0, 0
    for line in text.splitlines():
        if match := ENTRY.search(line):
            entry, stack, spill = match.groups(), 0, 0
        elif (match := STACK.search(line)) and entry:
            stack, spill = stack + int(match[1]), spill + int(match[2]) + int(match[3])  # and of functions it calls
        elif (match := USED.search(line)) and entry:
            yield *entry, stack, spill, int(match[1])
            entry = None


def main():
    rules = read_rules(Path(__file__).with_name("resources.allow"))
    count, findings, worst = 0, [], {}
    for log in sorted(Path(sys.argv[1]).rglob("*.log")):
        text = log.read_text()
        for name, arch, stack, spill, registers in kernels(text):
            count += 1
            key = (log.stem, arch)
            worst[key] = max(worst.get(key, 0), registers)
            if spill and not allowed(name, spill, rules):
                findings.append(f"{log.stem} {arch}: {spill} bytes of spills, {stack} bytes of stack: {name}")
        for line in text.splitlines():
            if SERIALISED.search(line) and not allowed(line, 0, rules):
                findings.append(f"{log.stem}: {line.strip()}")
    for kernel, took in _build.count.made(Path(sys.argv[1])).items():
        budget = _build.sets.BUDGET.get(kernel)
        functions = max(map(len, took.functions.values()), default=0)
        if budget and functions > budget.functions:
            findings.append(f"{kernel}: {functions} functions, the budget in fa_ext/_sets.py has {budget.functions}")
    for (unit, arch), registers in sorted(worst.items()):
        print(f"{unit:32} {arch:12} at most {registers} registers")
    print(f"{count} kernels, {len(findings)} findings")
    print("\n".join(findings))
    return 1 if findings or not count else 0


if __name__ == "__main__":
    sys.exit(main())
