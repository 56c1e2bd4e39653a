"""The version, in a module that imports nothing (setup reads it)."""

__version__ = "0.1.0"
