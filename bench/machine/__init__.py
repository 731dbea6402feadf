"""Where a figure was taken: processor, GPU, driver, toolkit, versions, a digest of the machine code, clocks and power."""

from __future__ import annotations

import datetime
import hashlib
import importlib.machinery
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.machine import build

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("numpy", "torch", "cupy-cuda13x", "cupy-cuda12x", "jax", "flash-attn", "flash-attn-3", "flashinfer-python",
            "xformers", "ml_dtypes", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12")  # fmt: skip


def built_codes() -> dict[str, dict[str, Any]]:
    """{kernel or ``core``: its machine code} of the extension in this tree, from what ``setup.py`` linked into it.

    A code is {"id", "kernel", "scheme", "device", "host", "compilers", "sources": {path: hash}}; `fa_ext/_digests.py` says
    what the digests of a scheme cover. {} where there is no extension, and where it is built for a debugger, a sanitizer or
    chaos; without kernels of which FA_INSTANCES leaves something out.
    """
    codes = {}
    for kernel, group in _built_groups().items():
        if group["host"] and group["is_whole"]:
            digests = {"kernel": kernel, "scheme": group["scheme"], "device": group["device"], "host": group["host"]}
            about = {name: group[name] for name in ("compilers", "sources")}
            codes[kernel] = digests | about | {"id": short_hash(digests)}
    return codes


def built_functions() -> dict[str, dict[str, str]]:
    """{key of a device function of that extension: {architecture: label of its machine code}}."""
    return {key: labels for group in _built_groups().values() for key, labels in group.get("functions", {}).items()}


def _built_groups() -> dict[str, dict[str, Any]]:
    places = (ROOT / "fa_ext" / f"_core{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES)
    found = next((build.rules.digests.read(place) for place in places if place.exists()), None)
    if not found or found["debug"] or found["sanitize"] or found["chaos"]:
        return {}
    parts = {name.partition(".")[0] for name in found.get("left_out", ())}
    return {name: group | {"scheme": found["format"], "is_whole": name not in parts} for name, group in found["groups"].items()}


def source_hashes(root: Path = ROOT) -> dict[str, str | None]:
    """{path: hash} of every source of the compiled module, from csrc/ and kernels/, as a code's `sources` have it."""
    files = (f for folder in ("csrc", "kernels") for f in (root / folder).rglob("*") if f.is_file())
    return {str(f.relative_to(root)): build.rules.digests.text_hash(f) for f in sorted(files)}


def short_hash(value: Any) -> str:
    """An id of twelve digits for a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def processor() -> str:
    """Name of the CPU as the kernel tells it."""
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def threads() -> int:
    """Threads that CPU implementations may use: OMP_NUM_THREADS, else the cores this process may run on."""
    return int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def compiler(command: str) -> str | None:
    """First telling line of `<command> --version`."""
    path = shutil.which(command) or (f"/usr/local/cuda/bin/{command}" if command == "nvcc" else None)
    try:
        printed = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, TypeError, subprocess.TimeoutExpired):
        return None
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    release = next((line for line in lines if "release" in line), lines[0] if lines else None)
    return release


def gpu() -> dict[str, Any] | None:
    """Name, driver and power limit of GPU 0 by NVML; None where there is no GPU or no nvidia-ml-py."""
    monitor = Monitor()
    return monitor.describe() if monitor.handle else None


def now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def context(device: str) -> dict[str, Any]:
    """Everything that a reader needs to judge a figure."""
    codes = {kernel: code["id"] for kernel, code in built_codes().items()}
    found: dict[str, Any] = {
        "date": now(), "device": device, "cpu": processor(), "threads": threads(), "python": platform.python_version(),
        "versions": versions(), "gcc": compiler("gcc"), "codes": codes, "digest": short_hash(codes),
    }  # fmt: skip
    if device == "cuda":
        found["gpu"] = gpu()
        found["nvcc"] = compiler("nvcc")
    return found


class Cores:
    """CPU time that others than this process and `workers` take, from construction on, on the cores that it may use
    (Linux)."""

    def __init__(self, workers: Sequence[int] = ()):
        self.workers = tuple(workers)
        self.cores = os.sched_getaffinity(0)
        self.began = self._read()

    def _read(self) -> tuple[float, float, float]:
        """Seconds that the cores spent at all and at work, and those that this process and its workers worked."""
        total = busy = 0.0
        try:
            for line in Path("/proc/stat").read_text().splitlines():
                name, *ticks = line.split()
                if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in self.cores:
                    # user, nice, system, idle, iowait, irq, softirq, steal; guests are part of user and nice
                    spent = [int(t) / os.sysconf("SC_CLK_TCK") for t in ticks[:8]]
                    total += sum(spent)
                    busy += sum(spent) - sum(spent[3:5])
        except OSError:
            pass
        return total, busy, time.process_time() + sum(map(_worked, self.workers))

    def others(self) -> float | None:
        """Share of the cores' time since then that others took, 0 to 1; None where the kernel does not tell."""
        total, busy, own = (now - then for now, then in zip(self._read(), self.began))
        return min(1.0, max(0.0, busy - own) / total) if total > 0 else None


def _worked(pid: int) -> float:
    """Seconds of CPU time of a process so far; 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def named_gpus() -> list[str]:
    """The devices of CUDA_VISIBLE_DEVICES, indices or UUIDs; [] where it is not set or empty."""
    return [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]


class Monitor:
    """Clocks, power and throttling of this process's first GPU through NVML; silent where there is none."""

    # Reasons under which a figure is not the kernel's: power cap, hardware slowdown, thermal (NVML's bit mask).
    THROTTLED = {0x4: "power cap", 0x8: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "hardware power brake"}

    def __init__(self):
        self.handle = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self.nvml = pynvml
            # NVML counts all GPUs by their place on the bus, which is CUDA's order too where they are alike.
            first = (named_gpus() or ["0"])[0]
            by = pynvml.nvmlDeviceGetHandleByIndex if first.isdigit() else pynvml.nvmlDeviceGetHandleByUUID
            self.handle = by(int(first) if first.isdigit() else first)
        except Exception:  # no package, no driver, no GPU: then there is nothing to watch
            self.handle = None

    def _ask(self, name: str, *args) -> Any:
        try:
            return getattr(self.nvml, name)(self.handle, *args)
        except Exception:  # NVML answers "not supported" for single values on some boards
            return None

    def describe(self) -> dict[str, Any]:
        name = self._ask("nvmlDeviceGetName")
        driver = self.nvml.nvmlSystemGetDriverVersion()
        limit = self._ask("nvmlDeviceGetEnforcedPowerLimit")
        clock = self._ask("nvmlDeviceGetMaxClockInfo", self.nvml.NVML_CLOCK_SM)
        return {
            "name": name.decode() if isinstance(name, bytes) else name,
            "driver": driver.decode() if isinstance(driver, bytes) else driver,
            "power_limit_w": None if limit is None else limit / 1000,
            "max_sm_clock_mhz": clock,
        }

    def read(self) -> dict[str, Any] | None:
        """{sm_clock_mhz, power_w, throttled}; `throttled` lists the reasons active now. None without a GPU."""
        if not self.handle:
            return None
        power = self._ask("nvmlDeviceGetPowerUsage")
        mask = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
        return {
            "sm_clock_mhz": self._ask("nvmlDeviceGetClockInfo", self.nvml.NVML_CLOCK_SM),
            "power_w": None if power is None else power / 1000,
            "throttled": [text for bit, text in self.THROTTLED.items() if mask & bit],
        }
