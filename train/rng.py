"""Random number generators' state of one process, as a safetensors file."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from eagle3.tensor_file import save_tensors


def save_rng(path: Path) -> None:
    """Write the states of python's, numpy's and torch's generators, atomically."""
    version, numbers, gauss = random.getstate()
    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict)
    tensors = {
        "python": torch.tensor(numbers),
        "numpy": torch.from_numpy(state["state"]["key"].astype(np.int64)),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    rest = [state["state"]["pos"], state["has_gauss"], state["gauss"]]
    scalars = {"python": [version, gauss], "numpy": [state["bit_generator"], *rest]}
    save_tensors(path, tensors, {"scalars": json.dumps(scalars)})


def load_rng(path: Path) -> None:
    """Set the generators as `save_rng` found them."""
    with safe_open(path, framework="pt") as file:
        scalars = json.loads(file.metadata()["scalars"])
        version, gauss = scalars["python"]
        random.setstate((version, tuple(file.get_tensor("python").tolist()), gauss))
        name, *rest = scalars["numpy"]
        np.random.set_state((name, file.get_tensor("numpy").numpy().astype(np.uint32), *rest))
        torch.set_rng_state(file.get_tensor("torch"))
        if torch.cuda.is_available() and "cuda" in file.keys():  # noqa: SIM118 (safe_open is no mapping)
            torch.cuda.set_rng_state(file.get_tensor("cuda"))
