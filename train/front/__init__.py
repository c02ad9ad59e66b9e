"""The front door's parts: composed config, stages, plan. Only these and `train/run.py` see every package."""
