"""Optimizers as framework-free state machines over flat float32 buffers."""
