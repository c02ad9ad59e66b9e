"""Answers written by the served target itself, through an OpenAI-compatible server."""

from data_prep.regenerate.config import RegenerateConfig
from data_prep.regenerate.report import show_report
from data_prep.regenerate.run import regenerate

__all__ = ["RegenerateConfig", "regenerate", "show_report"]
