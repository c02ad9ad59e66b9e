"""The training step of other tools beside ours, on the same draft and data; see `__main__`."""
