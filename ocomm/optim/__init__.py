"""Optimizers as state machines on flat float32 buffers, without a framework."""
