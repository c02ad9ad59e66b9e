"""Which conversations are trained on: quotas, duplicates, evaluation prompts, provenance."""

from data_prep.select.config import SelectConfig, SourceConfig
from data_prep.select.stage import select
from data_prep.select.table import show_selection

__all__ = ["SelectConfig", "SourceConfig", "select", "show_selection"]
