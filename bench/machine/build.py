"""``fa_ext/_build.py``, loaded by its path: variants are also built where ``fa_ext`` itself is not compiled."""

import importlib.util
import sys
from pathlib import Path

_PATH = Path(__file__).resolve().parents[2] / "fa_ext" / "_build.py"

if "fa_ext_build" not in sys.modules:
    _spec = importlib.util.spec_from_file_location("fa_ext_build", _PATH)
    assert _spec and _spec.loader
    sys.modules["fa_ext_build"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["fa_ext_build"])

rules = sys.modules["fa_ext_build"]
