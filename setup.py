"""Builds the wheel: pure Python packages and two stable-ABI extensions (see pyproject.toml for the metadata)."""

from setuptools import setup

setup(
    cffi_modules=["native/build.py:ffibuilder", "native/build_tf.py:ffibuilder"],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
