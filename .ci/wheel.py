"""Fails unless fa_ext is an installed wheel that brings its own OpenMP library: none of the system's is loaded."""

import sys
from pathlib import Path

import fa_ext

home = Path(fa_ext.__file__).resolve()
if "site-packages" not in home.parts:
    sys.exit(f"fa_ext is {home}, not an installed one")
mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
if not mapped or any("fa_ext.libs" not in path for path in mapped):
    sys.exit(f"OpenMP is {sorted(mapped)}, not the wheel's own")
