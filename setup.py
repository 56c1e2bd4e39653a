"""Builds the wheel: pure Python packages and one stable-ABI extension (see pyproject.toml for the metadata)."""

from setuptools import setup

setup(
    cffi_modules=["native/build.py:ffibuilder"],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
