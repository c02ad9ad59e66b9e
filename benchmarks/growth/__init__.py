"""How the cost of training and extraction grows with each size: `python -m benchmarks.growth` (docs/scaling.md)."""
