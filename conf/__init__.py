"""Hydra configuration: `base.yaml` plus one preset per experiment in `conf/`."""
