"""Answers written by the served target itself, through an OpenAI-compatible server: `run.regenerate`."""
