"""Sample files of other tools: say which tensor is which site of the target, and convert what can be trusted.

`python -m data_prep.legacy diagnose|convert`; docs/legacy.md shows both. Formats are read in `formats`, loaded safely
by `loading`, named by `judge` and `diagnose`, put into words by `explain`, planned by `plan`, written by `convert`.
"""
