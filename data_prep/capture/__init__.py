"""Capture backends: each returns the same named tensors, never a positional list."""
