"""Configuration of the acceptance measurement."""

from __future__ import annotations

from dataclasses import dataclass, field

from eagle3.config import require


@dataclass
class EvalConfig:
    """How accept length is measured."""

    engine: str = "local"
    prompt_sets: list[str] = field(default_factory=list)  # JSONL files of prompts, one set each, named by their stem
    max_prompts: int = 0  # per set; 0 = all
    max_new_tokens: int = 64
    num_steps: int = 3  # draft tokens proposed per verify step; the ceiling of tau is num_steps + 1
    temperature: float = 0.0  # 0 = greedy
    seed: int = 0
    # What to feed the draft: "matched" (the wiring it was trained on) and/or "native" (the engine's default).
    serve: list[str] = field(default_factory=lambda: ["matched"])
    baseline: bool = True  # also decode without a draft: speed and losslessness

    def validate(self) -> None:
        """Raise ConfigError on the first bad field."""
        require(self.engine == "local", "eval.engine", self.engine, "local")
        require(bool(self.prompt_sets), "eval.prompt_sets", self.prompt_sets, "at least one JSONL file")
        require(self.num_steps >= 1, "eval.num_steps", self.num_steps, "a positive integer")
        require(self.max_new_tokens >= 1, "eval.max_new_tokens", self.max_new_tokens, "a positive integer")
        require(self.temperature >= 0, "eval.temperature", self.temperature, "0 (greedy) or a positive number")
        require(bool(self.serve), "eval.serve", self.serve, "matched and/or native")
        for mode in self.serve:
            require(mode in ("matched", "native"), "eval.serve", mode, "matched or native")
