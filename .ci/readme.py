"""Prints the command that follows ``<!-- ci: NAME -->`` in the README, so that CI runs what the README says."""

import re
import sys
from pathlib import Path

text = (Path(__file__).resolve().parent.parent / "README.md").read_text()
found = re.search(rf"<!-- ci: {sys.argv[1]} -->\s*```(?:sh|bash)\n(.*?)```", text, re.DOTALL)
if not found:
    sys.exit(f"README.md has no command marked ci: {sys.argv[1]}")
print(found[1])
