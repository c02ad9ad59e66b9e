"""Which conversations are trained on: quotas, duplicates, evaluation prompts, provenance: `stage.select`."""
