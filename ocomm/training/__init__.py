"""A distributed optimizer without its framework: what Torch and TensorFlow frontends share, on one rank."""
