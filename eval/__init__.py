"""Acceptance measurement and its report."""
