"""Builds the extension ``fa_ext._core``: C by the C compiler, each CUDA file by nvcc, in parallel, linked with g++.

Environment: FA_CUDA=0|1, FA_ARCHS=<architectures>|wheel, FA_INSTANCES=core|all|<regex of instances>, FA_ONLY=<regex of
kernels>, FA_DEBUG=1, FA_SANITIZE=address,undefined, FA_CHAOS=1, MAX_JOBS, CC, CXX.
"""

import importlib.util
import sys
import sysconfig
from pathlib import Path

import setuptools

if int(setuptools.__version__.partition(".")[0]) < 77:  # it takes the licence in pyproject.toml for a mistake
    raise SystemExit(
        f"fa_ext: setuptools {setuptools.__version__} is too old for setup.py; accepted: 77 or newer "
        "(pip install 'setuptools>=77' numpy), or pip install -e ., which brings its own"
    )

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
_spec = importlib.util.spec_from_file_location("fa_ext_build", ROOT / "fa_ext" / "_build.py")
build = importlib.util.module_from_spec(_spec)
sys.modules["fa_ext_build"] = build
_spec.loader.exec_module(build)

# Free-threaded CPython has no stable ABI before 3.15: there the same source builds for one version.
LIMITED = not sysconfig.get_config_var("Py_GIL_DISABLED")


class BuildExt(build_ext):
    def build_extension(self, ext):
        try:
            self.build_core(ext)
        except build.OptionError as error:
            raise SystemExit(f"fa_ext: {error}") from None
        except build.BuildError as error:
            raise SystemExit(f"fa_ext: the build failed\n{error}") from None

    def build_core(self, ext):
        options = build.options_from_environment()
        units, defines = build.plan_units(options)
        options.defines = {
            **defines,
            "FA_VERSION": f'"{self.distribution.get_version()}"',
            "NPY_NO_DEPRECATED_API": "NPY_2_0_API_VERSION",
            "NPY_TARGET_VERSION": "NPY_2_0_API_VERSION",
        }
        if LIMITED:
            options.defines["Py_LIMITED_API"] = "0x030B0000"
        options.include_dirs = (numpy.get_include(),)
        print(build.count.first_line(build, units, options), flush=True)
        # Not build_temp, which an editable install throws away: objects are kept and reused while they are up to date.
        kinds = ["debug" if options.debug else "", "chaos" if options.chaos else "", options.sanitize.replace(",", "-")]
        kind = "-".join(filter(None, ["objects", *kinds]))
        folder = ROOT / "build" / kind / (sysconfig.get_config_var("SOABI") or "abi")
        objects = build.compile_all(units, folder, options, progress=True)
        objects.append(build.digests_object(units, objects, folder, options))
        build.link_shared(objects, Path(self.get_ext_fullpath(ext.name)).resolve(), options)
        if said := build.count.last_line(build.left_out(units), options):
            print(said, flush=True)


setup(
    ext_modules=[
        Extension("fa_ext._core", sources=["csrc/python/module.c"], py_limited_api=LIMITED),
    ],
    cmdclass={"build_ext": BuildExt},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if LIMITED else {},
)
