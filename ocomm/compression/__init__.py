"""Layout of compressed tensors, which is fixed, and their wire format."""
