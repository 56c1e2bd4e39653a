"""The distributed optimizers, and what they share."""
