"""Benchmarks that ship with the package: ``python -m ocomm.bench <name>``.

A benchmark is a module of this package with ``add_arguments(parser)`` and ``run(args)``; the first line of its
docstring is its help text.
"""
