"""Decisions about requests: which tensors are ready, what fuses, what does not match. Pure functions and state
machines.
"""
