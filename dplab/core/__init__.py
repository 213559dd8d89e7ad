"""What a training step is made of: layouts filled with tensors, buckets, roles, hooks, the optimizer."""
