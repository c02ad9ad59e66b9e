"""What only a GPU can tell, in one script that fits a short lease: `python -m benchmarks.gpu` (docs/gpu.md)."""
