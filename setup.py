"""Builds the wheel: pure Python packages, two stable-ABI extensions, and a library that no Python imports (see
pyproject.toml for the metadata)."""

from setuptools import Extension, setup

setup(
    ext_modules=[Extension("ocomm.launch._loopback", ["native/loopback.c"], libraries=["dl"], py_limited_api=True)],
    cffi_modules=["native/build.py:ffibuilder", "native/build_tf.py:ffibuilder"],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
