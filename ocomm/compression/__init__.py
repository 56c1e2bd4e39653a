"""Fixed layout of compressed tensors, and the wire format."""
