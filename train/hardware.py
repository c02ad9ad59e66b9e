"""The machines a run is planned for. Only the plan reads this: nothing here changes what is computed."""

from __future__ import annotations

from dataclasses import dataclass

from eagle3.config import require


@dataclass
class HardwareConfig:
    """One kind of node, and how fast it is taken to be; conf/hardware has presets (`+hardware=h100`)."""

    name: str = "H200"
    nodes: int = 1
    gpus_per_node: int = 8
    gpu_memory_gib: float = 139.0  # what CUDA reports of one GPU
    gpu_tflops: float = 989.0  # of one GPU in bfloat16, dense, as its data sheet says
    # Shares of that peak which are reached: assumptions, until an earlier run's own rates are known.
    prefill_mfu: float = 0.15  # the target reading conversations and its states being copied out
    train_mfu: float = 0.25  # the draft's forward and backward
    decode_tokens_s: float = 2500.0  # tokens a second that one node of the served target writes, all requests together
    disk_write_gbps: float = 2.0  # GB/s (10^9 bytes) from one node to where the store lies
    disk_read_gbps: float = 4.0
    measured: str = ""  # run folder whose own rates replace the assumptions; "" = this run's folder, if it has some

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return self.nodes * self.gpus_per_node

    def validate(self) -> None:
        """Raise ConfigError on the first bad field."""
        for name in ("nodes", "gpus_per_node"):
            require(getattr(self, name) >= 1, f"hardware.{name}", getattr(self, name), "a positive integer")
        for name in ("gpu_memory_gib", "gpu_tflops", "decode_tokens_s", "disk_write_gbps", "disk_read_gbps"):
            require(getattr(self, name) > 0, f"hardware.{name}", getattr(self, name), "a positive number")
        for name in ("prefill_mfu", "train_mfu"):
            require(0 < getattr(self, name) <= 1, f"hardware.{name}", getattr(self, name), "a share in (0, 1]")
