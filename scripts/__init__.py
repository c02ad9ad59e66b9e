"""Thin command-line entries."""
