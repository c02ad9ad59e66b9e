"""Configuration of the acceptance measurement."""

from __future__ import annotations

from dataclasses import dataclass, field

from eagle3.config import require
from eval.engines.server_config import ServerConfig

ENGINES = ("local", "sglang", "vllm")


@dataclass
class EvalConfig:
    """How accept length is measured."""

    engine: str = "local"  # "local" (in this process, batch 1), or a server: "sglang", "vllm"
    # JSONL files of prompts, one set each, named by their stem; or SET:FILE, SET:hf:NAME with SET one of
    # mtbench, mtbench2, gsm8k, humaneval, math500 (eval/benchmarks.py).
    prompt_sets: list[str] = field(default_factory=list)
    max_prompts: int = 0  # per set; 0 = all
    max_new_tokens: int = 64
    num_steps: int = 3  # draft tokens proposed per verify step; the ceiling of tau is num_steps + 1
    temperature: float = 0.0  # 0 = greedy
    seed: int = 0
    # What to feed the draft: "matched" (the wiring it was trained on) and/or "native" (the engine's default).
    serve: list[str] = field(default_factory=lambda: ["matched"])
    baseline: bool = True  # also decode without a draft: speed and losslessness
    batch_sizes: list[int] = field(default_factory=lambda: [1])  # requests in flight at a time; servers only
    alarm: float = 0.3  # gap allowed between predicted and served tau, as a share of the predicted gain tau - 1
    accept_other_target: bool = False  # measure a draft on other weights of its target's shape (quantized, fine-tuned)
    server: ServerConfig = field(default_factory=ServerConfig)  # of engine "sglang" or "vllm"

    def validate(self) -> None:
        """Raise ConfigError on the first bad field."""
        require(self.engine in ENGINES, "eval.engine", self.engine, " or ".join(ENGINES))
        require(bool(self.prompt_sets), "eval.prompt_sets", self.prompt_sets, "at least one JSONL file")
        require(self.num_steps >= 1, "eval.num_steps", self.num_steps, "a positive integer")
        require(self.max_new_tokens >= 1, "eval.max_new_tokens", self.max_new_tokens, "a positive integer")
        for name in ("max_prompts", "seed"):
            require(getattr(self, name) >= 0, f"eval.{name}", getattr(self, name), "0 or a positive integer")
        require(self.temperature >= 0, "eval.temperature", self.temperature, "0 (greedy) or a positive number")
        require(bool(self.serve), "eval.serve", self.serve, "matched and/or native")
        for mode in self.serve:
            require(mode in ("matched", "native"), "eval.serve", mode, "matched or native")
        sizes = self.batch_sizes
        whole = bool(sizes) and all(size >= 1 for size in sizes) and len(set(sizes)) == len(sizes)
        require(whole, "eval.batch_sizes", sizes, "different positive integers")
        if self.engine == "local":
            require(
                sizes == [1], "eval.batch_sizes", sizes, "[1] for the local engine, which decodes one text at a time"
            )
        require(self.alarm > 0, "eval.alarm", self.alarm, "a positive share of the predicted tau - 1")
        self.server.validate()
