"""Measures which tensors a server, a draft, a store or an installed tree really means (`python -m eval.probe`)."""
