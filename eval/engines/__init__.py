"""Engines that verify a draft's proposals; `local` is the in-process reference."""
