"""DeepSpeed's checkpoint reading, restricted to tensors and plain values: no code in a file is ever run."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from eagle3.errors import IntegrityError

# What DeepSpeed itself puts into its optimizer files beside tensors and plain values.
KNOWN = [LossScaler, ZeroStageEnum, fragment_address]


class SafeCheckpointEngine(TorchCheckpointEngine):
    """Saves as DeepSpeed does; loads with `weights_only=True` and DeepSpeed's own few classes allowed."""

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read one file.

        Raises:
            IntegrityError: the file holds anything that is not tensors, plain values or DeepSpeed's own classes.
        """
        try:
            with torch.serialization.safe_globals(KNOWN):
                return torch.load(path, map_location=map_location, weights_only=True)
        except Exception as err:
            raise IntegrityError(
                "a checkpoint file that cannot be read safely",
                where=path,
                why=str(err).splitlines()[0] if str(err) else type(err).__name__,
                mend="delete this checkpoint's folder; training goes on from the one before",
            ) from None
