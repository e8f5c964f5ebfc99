"""Models: loading, forward passes, sharding, checkpoints."""
