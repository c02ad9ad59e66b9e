"""How to reach or start the server that a draft is measured in."""

from __future__ import annotations

from dataclasses import dataclass, field

from eagle3.config import is_web_address, refuse_keys, require


@dataclass
class ServerConfig:
    """A running server (`url`), or how to start one and stop it again."""

    url: str = ""  # of a running server that serves the draft; empty = start one
    baseline_url: str = ""  # of a running server with the same target and no draft, for plain decoding beside `url`
    python: str = ""  # interpreter that has the engine; empty = the one that runs this
    env: dict[str, str] = field(default_factory=dict)  # added to the started server's environment
    host: str = "127.0.0.1"  # where a started server listens
    port: int = 0  # 0 = a free one
    start_timeout_s: float = 900.0  # loading weights and the warm-up included
    request_timeout_s: float = 600.0  # of one continuation
    retries: int = 2  # of one request, on a refused or broken connection, a 5xx or 429 answer, half an answer
    outage_s: float = 60.0  # how long a server that cannot be reached any more is waited for
    log_dir: str = ""  # of started servers; empty = the run's folder
    tp: int = 1  # GPUs that share the target
    dtype: str = "auto"
    topk: int = 1  # proposals per draft step; above 1 the proposals are a tree
    draft_tokens: int = 0  # tokens judged per verify; 0 = num_steps + 1, which topk 1 demands
    convention: str = "auto"  # whose ids to write (docs/wiring.md); auto = found out from the build
    tree: str = ""  # SGLang source tree to find the convention from; empty = the one that `python` imports
    extra_args: list[str] = field(default_factory=list)  # further flags of the server

    @property
    def connects(self) -> bool:
        """A running server is used, none is started."""
        return bool(self.url or self.baseline_url)

    def validate(self) -> None:
        """Raise ConfigError on the first bad field."""
        for name in ("url", "baseline_url"):
            value = getattr(self, name)
            require(
                not value or is_web_address(value),
                f"eval.server.{name}",
                value,
                "http://host:port without a password, or nothing to start a server",
            )
        refuse_keys("eval.server.env", self.env)
        refuse_keys("eval.server.extra_args", self.extra_args)
        require(bool(self.host), "eval.server.host", self.host, "an address to listen on, e.g. 127.0.0.1")
        require(0 <= self.port < 65536, "eval.server.port", self.port, "0 (a free one) to 65535")
        for name in ("start_timeout_s", "request_timeout_s"):
            require(getattr(self, name) > 0, f"eval.server.{name}", getattr(self, name), "a positive number of seconds")
        require(self.retries >= 0, "eval.server.retries", self.retries, "0 or more")
        require(self.outage_s >= 0, "eval.server.outage_s", self.outage_s, "0 or a number of seconds")
        for name in ("tp", "topk"):
            require(getattr(self, name) >= 1, f"eval.server.{name}", getattr(self, name), "a positive integer")
        require(self.draft_tokens >= 0, "eval.server.draft_tokens", self.draft_tokens, "0 or a positive integer")
        require(bool(self.dtype), "eval.server.dtype", self.dtype, "auto, bfloat16, float16 or float32")
        require(bool(self.convention), "eval.server.convention", self.convention, "auto or a name in docs/wiring.md")
