"""Draft training under DeepSpeed, and the pipeline's front door (`train/run.py`)."""
