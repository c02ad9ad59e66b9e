"""The loader against steps of the length that a GPU's would have: `python -m benchmarks.loader`."""
