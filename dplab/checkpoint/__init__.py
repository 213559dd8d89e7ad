"""Checkpoints: what the ranks hold, as logical tensors by name, on disk and back."""
