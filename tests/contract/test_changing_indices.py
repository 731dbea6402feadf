"""Index arrays that somebody changes during a call: whatever they hold at any moment, every kernel stays inside its arrays."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import changing
import fa_ext
import rows
from fa_ext import _core

APPEND = [name for name in _core.build_info()["kernels"] if name.endswith("append")]
KERNELS = [name for name in (*fa_ext.kernels(), *APPEND) if next(changing.cases(name), None)]
ON_CPU = [name for name in KERNELS if rows.device_of(name) == "cpu"]


@pytest.mark.parametrize("kernel", ON_CPU)
def test_a_thread_changes_them(kernel):
    helper = Path(changing.__file__)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(helper.parent), str(Path(fa_ext.__file__).parents[1])])}
    done = subprocess.run([sys.executable, helper, kernel, "0.3"], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
