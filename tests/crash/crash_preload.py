"""What the fork server imports once, so that a child begins with the product loaded and nothing begun."""

import os

os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="", WANDB_MODE="disabled")

import crash_child  # noqa: F401
import deepspeed  # noqa: F401
import hydra  # noqa: F401
import matplotlib.pyplot  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401

import train.front.pipeline
import train.loop
import train.run
import train.safe_checkpoint
import train.worker  # noqa: F401
