"""Configuration of draft training and of experiment tracking."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from eagle3.config import require

OBJECTIVES = ("soft_ce", "acceptance", "log_acceptance", "mixed")
OUTSIDE = ("drop", "teach")
SCHEDULES = ("cosine", "linear", "wsd")


@dataclass
class ObjectiveConfig:
    """What each row of the draft is taught (`train.objective` has the formulas)."""

    kind: str = "soft_ce"  # "soft_ce", "acceptance" (total variation), "log_acceptance", "mixed" (the first two)
    ce_weight: float = 0.5  # "mixed": share of cross entropy, the rest is total variation
    ce_fade: float = 0.0  # "mixed": that share falls by exp(-ce_fade * chance of being kept); 0 = it stays
    teacher_temperature: float = 1.0  # divisor of the teacher's logits; below 1 it is surer of its best token
    outside: str = "drop"  # rows whose best token the draft lacks: "drop" (as EAGLE), "teach" what is left (cheaper)

    def validate(self) -> None:
        """Raise ConfigError on the first bad field."""
        require(self.kind in OBJECTIVES, "train.objective.kind", self.kind, " or ".join(OBJECTIVES))
        require(0 <= self.ce_weight <= 1, "train.objective.ce_weight", self.ce_weight, "a share in [0, 1]")
        require(self.ce_fade >= 0, "train.objective.ce_fade", self.ce_fade, "0 or a positive number")
        require(self.outside in OUTSIDE, "train.objective.outside", self.outside, " or ".join(OUTSIDE))
        temperature = self.teacher_temperature
        require(temperature > 0, "train.objective.teacher_temperature", temperature, "a positive number")


@dataclass
class TrainConfig:
    """Optimization of the draft under DeepSpeed."""

    ttt_steps: int = 7  # training-time-test steps K
    step_decay: float = 0.8  # weight of step k is step_decay ** k
    step_weights: list[float] = field(default_factory=list)  # weight of each step, instead of step_decay; empty = by it
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    feature_noise: float = 0.0  # uniform noise on the aux states, as a share of each state's mean size; 0 = none
    epochs: int = 1
    max_steps: int = 0  # optimizer steps; 0 = as many as the epochs hold
    global_batch_size: int = 8  # conversations per optimizer step, over all processes
    micro_batch_size: int = 8  # conversations per forward pass of one process, at most
    processes: int = 1  # training processes on each machine; 0 = one per GPU (1 without a GPU)
    nodes: int = 1  # machines; above 1, a launcher of scripts/launch starts the processes of all of them
    lr: float = 1e-4
    schedule: str = "cosine"  # after the warm-up: "cosine", "linear", or "wsd" (flat, then linear over the last part)
    decay_ratio: float = 0.2  # "wsd": share of all steps over which the rate falls
    min_lr_ratio: float = 0.0  # the schedule ends at lr * min_lr_ratio
    warmup_ratio: float = 0.015
    weight_decay: float = 0.0
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    grad_clip: float = 1.0
    zero_stage: int = 0  # DeepSpeed's ZeRO stage; -1 = the lowest that fits gpu_memory_gib, by train/memory.py
    gpu_memory_gib: float = 0.0  # memory of one GPU, for zero_stage -1; 0 = as the GPU here says (hardware.* in a plan)
    memory_margin: float = 0.1  # share of it that the arithmetic leaves free: CUDA's context, NCCL, fragmentation
    offload_optimizer: bool = False  # keep master weights and Adam's moments in the host's memory, and step there
    activation_checkpointing: str = "none"  # "step": compute each unrolled step again in backward; less memory, slower
    overlap_comm: bool = True  # reduce gradients while backward goes on (GPUs, several processes)
    bucket_elements: int = 500_000_000  # gradients reduced at once, at most; each bucket is a buffer in GPU memory
    dtype: str = "auto"  # "auto": float32 on CPU, bfloat16 on GPU
    head_chunk: int = 0  # rows of draft logits a block; 0 = 1024, on a CPU as many as take 64 MiB where that is fewer
    prefetch_steps: int = 4  # optimizer steps whose data is read ahead, at most
    prefetch_mib: int = 2048  # memory of a process for data read ahead; three of the largest micro-batches at least
    loader_workers: int = -1  # processes that read and decode for a training process; 0 = none: a thread of its own;
    # -1 = none for a raw store or a small one, else by the processors at hand (train/loader.py)
    seed: int = 0
    save_every: int = 100  # optimizer steps between checkpoints
    keep_checkpoints: int = 2
    val_every: int = 0  # optimizer steps between validations; 0 = only at the end
    log_every: int = 1

    def validate(self) -> None:
        """Raise ConfigError on the first bad field."""
        require(1 <= self.ttt_steps <= 16, "train.ttt_steps", self.ttt_steps, "1 to 16")
        require(0 < self.step_decay <= 1, "train.step_decay", self.step_decay, "a factor in (0, 1]")
        self._validate_steps()
        batches = ("epochs", "global_batch_size", "micro_batch_size")
        for name in (*batches, "save_every", "keep_checkpoints", "log_every"):
            require(getattr(self, name) >= 1, f"train.{name}", getattr(self, name), "a positive integer")
        require(self.processes >= 0, "train.processes", self.processes, "0 (one per GPU) or a positive integer")
        require(self.nodes >= 1, "train.nodes", self.nodes, "a positive integer")
        for name in ("max_steps", "val_every", "seed", "head_chunk"):
            require(getattr(self, name) >= 0, f"train.{name}", getattr(self, name), "0 or a positive integer")
        require(self.lr > 0, "train.lr", self.lr, "a positive number")
        require(0 <= self.warmup_ratio < 1, "train.warmup_ratio", self.warmup_ratio, "a share in [0, 1)")
        require(0 <= self.min_lr_ratio <= 1, "train.min_lr_ratio", self.min_lr_ratio, "a share in [0, 1]")
        require(self.weight_decay >= 0, "train.weight_decay", self.weight_decay, "0 (off) or a positive number")
        betas = self.betas
        sound = len(betas) == 2 and all(0 <= beta < 1 for beta in betas)
        require(sound, "train.betas", betas, "two numbers in [0, 1)")
        require(self.grad_clip >= 0, "train.grad_clip", self.grad_clip, "0 (off) or a positive number")
        require(self.schedule in SCHEDULES, "train.schedule", self.schedule, " or ".join(SCHEDULES))
        require(0 < self.decay_ratio <= 1, "train.decay_ratio", self.decay_ratio, "a share in (0, 1]")
        self._validate_memory()
        require(self.prefetch_steps >= 1, "train.prefetch_steps", self.prefetch_steps, "a positive integer")
        require(self.prefetch_mib >= 1, "train.prefetch_mib", self.prefetch_mib, "a positive number of MiB")
        require(self.loader_workers >= -1, "train.loader_workers", self.loader_workers, "-1 (chosen), 0 or a number")
        require(self.dtype in ("auto", "float32", "bfloat16"), "train.dtype", self.dtype, "auto, float32 or bfloat16")

    def _validate_steps(self) -> None:
        weights = self.step_weights
        fits = not weights or (len(weights) == self.ttt_steps and min(weights) >= 0 and sum(weights) > 0)
        require(fits, "train.step_weights", weights, f"[] or {self.ttt_steps} numbers, none negative, not all 0")
        noise = self.feature_noise
        require(noise >= 0, "train.feature_noise", noise, "0 (off) or a positive share")
        self.objective.validate()

    def step_factors(self) -> list[float]:
        """Weight of each unrolled step, [K]."""
        return list(self.step_weights) or [self.step_decay**k for k in range(self.ttt_steps)]

    def _validate_memory(self) -> None:
        require(self.zero_stage in (-1, 0, 1, 2, 3), "train.zero_stage", self.zero_stage, "-1 (chosen), 0, 1, 2 or 3")
        gib = self.gpu_memory_gib
        require(gib >= 0, "train.gpu_memory_gib", gib, "0 (as the GPU says) or a number of GiB")
        margin = self.memory_margin
        require(0 <= margin < 1, "train.memory_margin", margin, "a share in [0, 1)")
        kinds = ("none", "step")
        kind = self.activation_checkpointing
        require(kind in kinds, "train.activation_checkpointing", kind, " or ".join(kinds))
        require(self.bucket_elements >= 1, "train.bucket_elements", self.bucket_elements, "a positive integer")
        if self.offload_optimizer:
            staged = self.zero_stage != 0
            require(staged, "train.zero_stage", self.zero_stage, "1, 2, 3 or -1 with train.offload_optimizer")


@dataclass
class TrackConfig:
    """Experiment tracking; the same metrics always go to `metrics.jsonl`."""

    wandb: str = "auto"  # "auto": online with an API key, else offline; "online", "offline", "disabled"
    project: str = "redraft"
    entity: str = ""  # user or team whose project it is; "" = the default of the key
    group: str = ""  # runs of one group are shown together; "" = none, and the jobs of a sweep are one group
    job_type: str = "draft"  # kind of run, to filter by; one run holds training and measurement
    tags: list[str] = field(default_factory=list)
    artifacts: bool = True  # record the store's manifest and the served folder with its model card
    artifact_mib: int = 16  # files up to this size are uploaded; larger ones are entered by their place and size

    def validate(self) -> None:
        """Raise ConfigError on the first bad field."""
        modes = ("auto", "online", "offline", "disabled")
        require(self.wandb in modes, "track.wandb", self.wandb, " or ".join(modes))
        slashes = "one word without / \\ # ? % :"
        require(bool(re.fullmatch(r"[^/\\#?%:]{1,128}", self.project)), "track.project", self.project, slashes)
        require(bool(re.fullmatch(r"[\w.-]*", self.entity)), "track.entity", self.entity, "a user or team, or nothing")
        for name in ("group", "job_type"):
            value = getattr(self, name)
            require(len(value) <= 128, f"track.{name}", value, "at most 128 characters")
        for tag in self.tags:
            require(1 <= len(tag) <= 64, "track.tags", tag, "1 to 64 characters")
        require(self.artifact_mib >= 0, "track.artifact_mib", self.artifact_mib, "0 or a number of MiB")
