"""A distributed optimizer without its framework: what the frontends of Torch and TensorFlow share, on one rank."""
