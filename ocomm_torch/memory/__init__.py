"""Where tensors are, how their elements lie there, and what an exchange reads of them."""
