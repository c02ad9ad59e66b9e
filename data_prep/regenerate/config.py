"""Configuration of the regeneration: whom to ask, how to sample, what to keep, when to give up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from eagle3.config import is_web_address, refuse_keys, require


@dataclass
class RegenerateConfig:
    """How the target's own answers are asked for (keys under `regenerate`).

    A sampling value that is null is taken "as served": from the generation_config.json of the server's model, where
    SGLang and vLLM take it too, else the engines' neutral value. What was used is sent with each request and kept with
    each answer.
    """

    source: str = ""  # JSON lines of conversations; the answers they hold are replaced
    url: str = ""  # of a running server of the target alone; "" = the stage starts one
    server_args: list[str] = field(default_factory=list)  # further flags of a started server, such as its parsers
    model: str = ""  # name the server answers to; "" = the one it lists at /v1/models
    api_key_env: str = ""  # NAME of the environment variable that holds the API key; "" = none is sent
    concurrency: int = 64  # conversations under way at any moment
    max_tokens: int = 4096  # of one answer, reasoning included
    temperature: float | None = None  # 0 = greedy; null = as served, and so below
    top_p: float | None = None
    top_k: int | None = None  # -1 = all tokens
    min_p: float | None = None
    repetition_penalty: float | None = None
    generation_config: str = ""  # folder or file to read "as served" from; "" = the server's model folder
    seed: int = 0  # each answer is sampled with a seed of its own, made of this, the record's id and the turn
    thinking: bool | None = None  # given to the chat template as `thinking` and `enable_thinking`; null = its default
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # further chat template arguments
    turns: str = "last"  # "last" answer alone, or "all" in order, each after the answers regenerated before it
    keep_empty: bool = False  # keep answers in which nothing is said
    keep_token_ids: bool = True  # keep the token ids of the last answer and its prompt, where the server gives them
    retries: int = 4  # of one request: 429, 5xx, timeouts, broken connections, answers that cannot be read
    backoff_s: float = 1.0  # before the first retry; doubled for each further one, up to 30 s
    timeout_s: float = 900.0  # of one request
    outage_s: float = 300.0  # how long an unreachable server is waited for before the stage ends
    max_failures: float = 0.01  # share of records that may fail; above it the stage ends with an error

    def validate(self) -> None:
        """Raise ConfigError on the first bad field."""
        where = "regenerate"
        ok = not self.url or is_web_address(self.url)
        require(ok, f"{where}.url", self.url, "http://host:port, or nothing to start a server")
        refuse_keys(f"{where}.server_args", self.server_args)
        for name in ("concurrency", "max_tokens"):
            require(getattr(self, name) >= 1, f"{where}.{name}", getattr(self, name), "a positive integer")
        self._validate_sampling(where)
        require(self.turns in ("last", "all"), f"{where}.turns", self.turns, "last or all")
        require(self.retries >= 0, f"{where}.retries", self.retries, "0 or more")
        for name in ("timeout_s", "backoff_s", "outage_s"):
            require(getattr(self, name) > 0, f"{where}.{name}", getattr(self, name), "a positive number of seconds")
        require(0 <= self.max_failures <= 1, f"{where}.max_failures", self.max_failures, "a share in [0, 1]")
        plain = not self.api_key_env or self.api_key_env.isidentifier()
        require(plain, f"{where}.api_key_env", "(not shown)", "the NAME of an environment variable, not the key itself")
        for name in ("thinking", "enable_thinking"):
            twice = name in self.template_kwargs and self.thinking is not None
            require(not twice, f"{where}.template_kwargs.{name}", self.template_kwargs.get(name),
                    "nothing here, for regenerate.thinking sets it")  # fmt: skip

    def _validate_sampling(self, where: str) -> None:
        bounds: dict[str, tuple[float, float, str]] = {
            "temperature": (0.0, float("inf"), "0 (greedy) or more, or null"),
            "top_p": (1e-6, 1.0, "a share in (0, 1], or null"),
            "min_p": (0.0, 1.0, "a share in [0, 1], or null"),
            "repetition_penalty": (1e-6, 2.0, "a factor in (0, 2], or null"),
        }
        for name, (low, high, expected) in bounds.items():
            value = getattr(self, name)
            require(value is None or low <= value <= high, f"{where}.{name}", value, expected)
        good = self.top_k is None or self.top_k == -1 or self.top_k >= 1
        require(good, f"{where}.top_k", self.top_k, "-1 (all tokens), a positive integer, or null")

    @property
    def chat_template_kwargs(self) -> dict[str, Any]:
        """What the chat template is given; templates name the switch of reasoning one way or the other."""
        switch = {} if self.thinking is None else {"thinking": self.thinking, "enable_thinking": self.thinking}
        return {**switch, **self.template_kwargs}
