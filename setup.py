"""Builds the wheel: pure Python packages, two stable-ABI extensions, and a library that no Python imports (see
pyproject.toml for the metadata)."""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class BuildExt(build_ext):
    def pre_run(self, ext, ffi):
        """cffi calls it for each of its modules, before that is built: some include headers that are made first."""
        if hasattr(ffi, "write_headers"):
            ffi.write_headers(Path(self.build_temp))
            ext.include_dirs.append(self.build_temp)


setup(
    ext_modules=[Extension("ocomm.launch._loopback", ["native/loopback.c"], libraries=["dl"], py_limited_api=True)],
    cffi_modules=["native/build.py:ffibuilder", "native/build_tf.py:ffibuilder"],
    cmdclass={"build_ext": BuildExt},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
