"""Targets that need no download: the packaged SmolLM2 and a tiny DeepSeek-V3 maker."""
