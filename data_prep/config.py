"""Configuration of data preparation: conversations, rendering, capture, store."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from data_prep.markers import CHOICES
from eagle3.config import STATE_CODECS, is_web_address, refuse_keys, require


@dataclass
class DataConfig:
    """Where conversations come from and how they become tokens and a loss mask."""

    sources: list[str] = field(default_factory=list)  # JSONL files, HF `datasets` folders or hub names
    split: str = "train"  # split read from an HF dataset
    max_samples: int = 0  # 0 = all
    max_length: int = 2048  # tokens kept per conversation
    val_fraction: float = 0.05  # share held out for validation, chosen by a hash of the record and `seed`
    seed: int = 0
    thinking: bool = True  # supervise reasoning that the sample itself holds
    tools: bool = True  # supervise assistant tool calls
    turns: str = "served"  # "served": each assistant turn as the server had it; "all" in one text; "last": the last one
    truncated: str = "keep"  # answers that were cut off: "keep" (no end of turn is learnt) or "skip"
    exact_tokens: bool = True  # learn the very tokens that came with an answer (`token_ids`), where a record has them
    markers: str = "auto"  # family of chat markers: "auto", "none", or its name (docs/rendering.md)
    on_nothing_to_learn: str = "skip"  # "skip" (counted and named) or "refuse"
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # further chat template arguments, as served

    def validate(self) -> None:
        """Raise ConfigError on the first bad field."""
        require(bool(self.sources), "data.sources", self.sources, "at least one file, folder or dataset name")
        require(self.max_length >= 4, "data.max_length", self.max_length, "at least 4 tokens")
        for name in ("max_samples", "seed"):
            require(getattr(self, name) >= 0, f"data.{name}", getattr(self, name), "0 or a positive integer")
        require(all(self.sources), "data.sources", self.sources, "no empty name")
        require(0.0 <= self.val_fraction < 1.0, "data.val_fraction", self.val_fraction, "a share in [0, 1)")
        for name, allowed in (
            ("turns", ("served", "all", "last")),
            ("truncated", ("keep", "skip")),
            ("markers", CHOICES),
        ):
            value = getattr(self, name)
            require(value in allowed, f"data.{name}", value, " or ".join(allowed))
        require(
            self.on_nothing_to_learn in ("skip", "refuse"),
            "data.on_nothing_to_learn",
            self.on_nothing_to_learn,
            "skip or refuse",
        )


@dataclass
class SGLangCaptureConfig:
    """How SGLang is run, or reached, to read the target's hidden states."""

    python: str = ""  # interpreter that has SGLang; "" = this one
    env: dict[str, str] = field(default_factory=dict)  # variables for that interpreter
    tp: int = 1  # GPUs that share the target
    convention: str = "auto"  # whose layer ids this build reads: "auto" = its release's, or "sglang-..."
    mem_fraction: float = 0.0  # share of GPU memory for weights and cache; 0 = SGLang's choice
    extra_args: list[str] = field(default_factory=list)  # further server flags
    start_timeout_s: float = 3600.0  # loading a target of a trillion parameters takes its time
    timeout_s: float = 600.0  # one forward pass, or one HTTP request
    url: str = ""  # sglang_http: server that returns aux hidden states
    teacher_url: str = ""  # sglang_http: server of the same target that returns last-layer hidden states

    def validate(self, backend: str) -> None:
        """Raise ConfigError on the first bad field."""
        require(self.tp >= 1, "capture.sglang.tp", self.tp, "a positive integer")
        require(0.0 <= self.mem_fraction < 1.0, "capture.sglang.mem_fraction", self.mem_fraction, "a share in [0, 1)")
        for name in ("start_timeout_s", "timeout_s"):
            require(getattr(self, name) > 0, f"capture.sglang.{name}", getattr(self, name), "seconds above 0")
        refuse_keys("capture.sglang.env", self.env)
        refuse_keys("capture.sglang.extra_args", self.extra_args)
        for name in ("url", "teacher_url"):
            value = getattr(self, name)
            ok = is_web_address(value) or not (value or backend == "sglang_http")
            expected = "the address of a server, http://host:port without a password"
            require(ok, f"capture.sglang.{name}", value, expected)


@dataclass
class CaptureConfig:
    """How the target is run to read its hidden states."""

    backend: str = "hf"  # "hf"; "sglang": its model code, in a process of its own; "sglang_http": running servers
    device: str = "auto"  # hf: "auto", "cpu", "cuda"
    compute_dtype: str = "auto"  # hf: float32 on CPU, bfloat16 on GPU; sglang: the target's 16-bit type, or bfloat16
    batch_tokens: int = 4096  # padded tokens per forward pass
    window_batches: int = 32  # full batches among whose records those of like length go together (docs/benchmarks.md)
    writers: int = 2  # shards encoded and written at a time, while the next are captured
    write_ahead_mib: int = 4096  # captured states that may wait to be written, in memory; two shards always may
    processes: int = 1  # workers on this machine, each with its share of the visible GPUs
    restarts: int = 2  # how often each of several workers is started again when it dies
    claims_dir: str = ""  # where workers claim work: a POSIX folder that all see; "" = in the store, or in run_dir
    claim_timeout_s: float = 300.0  # a worker not heard of for so long is taken for dead
    wait: bool = True  # when only other workers' units are left: wait for them, or leave and say whose they are
    sglang: SGLangCaptureConfig = field(default_factory=SGLangCaptureConfig)

    def validate(self) -> None:
        """Raise ConfigError on the first bad field."""
        backends = ("hf", "sglang", "sglang_http")
        require(self.backend in backends, "capture.backend", self.backend, " or ".join(backends))
        device = self.device.partition(":")[0]
        require(device in ("auto", "cpu", "cuda"), "capture.device", self.device, "auto, cpu, cuda or cuda:N")
        require(self.batch_tokens > 0, "capture.batch_tokens", self.batch_tokens, "a positive integer")
        for name in ("window_batches", "writers", "write_ahead_mib"):
            require(getattr(self, name) >= 1, f"capture.{name}", getattr(self, name), "a positive integer")
        dtypes = ("auto", "float32", "bfloat16", "float16")
        require(self.compute_dtype in dtypes, "capture.compute_dtype", self.compute_dtype, " or ".join(dtypes))
        require(self.processes >= 1, "capture.processes", self.processes, "a positive integer")
        require(self.restarts >= 0, "capture.restarts", self.restarts, "0 or a positive integer")
        require(self.claim_timeout_s >= 1, "capture.claim_timeout_s", self.claim_timeout_s, "at least 1 second")
        self.sglang.validate(self.backend)


@dataclass
class StoreConfig:
    """The hidden-state store on disk."""

    codec: str = "raw"  # "raw"; "lossless": 2/3 of its size, bit for bit; "fp8", "int8": about half, rounded
    shard_tokens: int = 16384  # tokens per shard, which workers claim; a crash costs those not yet written
    accept_other_wiring: bool = False  # read by name from a store made for another wiring that holds the sites needed
    verify_records: int = 3  # records computed again with Hugging Face's target before training; 0 = none
    verify_max_gib: float = 20.0  # ... unless the target's weights are larger than this

    def validate(self) -> None:
        """Raise ConfigError on the first bad field."""
        require(self.codec in STATE_CODECS, "store.codec", self.codec, " or ".join(STATE_CODECS))
        require(self.shard_tokens > 0, "store.shard_tokens", self.shard_tokens, "a positive integer")
        require(self.verify_records >= 0, "store.verify_records", self.verify_records, "0 or a positive integer")
        require(self.verify_max_gib >= 0, "store.verify_max_gib", self.verify_max_gib, "0 or a positive number")
