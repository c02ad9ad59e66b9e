"""SGLang as a server: started here or already running, with one draft wiring or none.

What is asked on its command line, what it resolved that to, and whose layer-id convention it follows stand in
`Session.facts`; where the server says something else than was asked, the measure stops with one line.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from eagle3.errors import RedraftError
from eagle3.wiring import Wiring
from eval.engines.as_served import IDS, as_served, as_written
from eval.engines.base import Ask, BatchRun, Generation, Session
from eval.engines.client import JsonServer
from eval.engines.flags import check_extra_args, draft_tokens, sglang_speculation
from eval.engines.launch import (
    COUNTERS,
    ServerAdapter,
    check_name,
    check_resolved,
    check_slots,
    joined_wiring,
    launched,
    wiring_facts,
)
from eval.engines.server_config import ServerConfig
from eval.engines.sglang_build import Choice, check_feeds, choose_convention, find_build
from eval.engines.sglang_counts import generation_from

# Every spelling of a flag that the configuration decides, and the setting that does (server_args.py of 0.5.9 and
# arg_groups/fields of 0.5.23).
MANAGED = {
    "--model-path": "target.path",
    "--model": "target.path",
    "--trust-remote-code": "target.trust_remote_code",
    "--host": "eval.server.host",
    "--port": "eval.server.port",
    "--tp-size": "eval.server.tp",
    "--tp": "eval.server.tp",
    "--tensor-parallel-size": "eval.server.tp",
    "--dtype": "eval.server.dtype",
    "--speculative-algorithm": "eval.engine",
    "--speculative-draft-model-path": "eval.engine",
    "--speculative-draft-model": "eval.engine",
    "--speculative-num-steps": "eval.num_steps",
    "--speculative-eagle-topk": "eval.server.topk",
    "--speculative-num-draft-tokens": "eval.server.draft_tokens",
    "--disable-radix-cache": "the measure itself",
    "--skip-tokenizer-init": "the measure itself",
}
# Values worth keeping beside a result, where the server reports them.
REPORTED = (
    "version",
    "model_path",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_attention_mode",
    "speculative_draft_attention_backend",
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "tp_size",
    "dp_size",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "page_size",
    "device",
    "disable_radix_cache",
    "disable_overlap_schedule",
    "max_running_requests",
    "max_total_num_tokens",
    "random_seed",
)
Command = Callable[[str, Sequence[str]], list[str]]


def sglang_command(python: str, flags: Sequence[str]) -> list[str]:
    """The command that starts a server."""
    return [python, "-m", "sglang.launch_server", *flags]


class SGLangEngine(ServerAdapter):
    """A target with a draft in SGLang.

    Args:
        target, served, trained, num_steps, cfg, work_dir, trust_remote_code: as `ServerAdapter`.
        command: builds the command line of a started server from the interpreter and the flags.
        ids: written as they are instead of the build's own for the wiring, unchecked, to see what it does with them.

    Raises:
        ConfigError: settings that contradict one another.
    """

    name = "sglang"

    def __init__(
        self,
        target: Path,
        served: Path,
        trained: Wiring,
        num_steps: int,
        cfg: ServerConfig,
        work_dir: Path,
        trust_remote_code: bool = False,
        command: Command = sglang_command,
        ids: Sequence[int] | None = None,
    ) -> None:
        super().__init__(target, served, trained, num_steps, cfg, work_dir, trust_remote_code)
        self.draft_tokens = draft_tokens(num_steps, cfg.topk, cfg.draft_tokens)
        check_extra_args(cfg.extra_args, MANAGED)
        self._command, self._ids = command, ids

    # Started here

    @contextlib.contextmanager
    def _launch(self, wiring: Wiring | None) -> Iterator[Session]:
        cfg = self.cfg
        python = cfg.python or sys.executable
        build = find_build(python, cfg.env, "sglang")
        facts: dict[str, Any] = {"engine": self.name, "build": build.version}
        with contextlib.ExitStack() as stack:
            folder = None
            if wiring is not None:
                tree = Path(cfg.tree) if cfg.tree else build.tree
                choice = choose_convention(cfg.convention, tree, build.version, self.target, wiring.model_type)
                if self._ids is None:
                    check_feeds(choice, wiring, cfg.extra_args)
                folder, ids = stack.enter_context(self._folder(wiring, choice))
                facts |= wiring_facts(wiring, choice, ids)
            http, how = stack.enter_context(
                launched(
                    self.name,
                    wiring,
                    cfg,
                    lambda port: self._command(python, self._flags(folder, port)),
                    self.work_dir,
                    {},
                )
            )
            info = server_info(http)
            check_resolved(self._asked(folder), info, http.url)
            yield self._session(http, info, facts | how, wiring)

    def _folder(self, wiring: Wiring, choice: Choice) -> AbstractContextManager[tuple[Path, list[int]]]:
        if self._ids is not None:
            return as_written(self.served, self._ids, self.work_dir)
        return as_served(self.served, wiring, choice.name, self.work_dir)

    def _flags(self, folder: Path | None, port: int) -> list[str]:
        cfg = self.cfg
        flags = ["--model-path", str(self.target), "--host", cfg.host, "--port", str(port)]
        flags += ["--tp-size", str(cfg.tp), "--dtype", cfg.dtype]
        # A prefix cache would hand the second batch size the prompts that the first has computed.
        flags += ["--disable-radix-cache"]
        if self.trust_remote_code:
            flags += ["--trust-remote-code"]
        if folder is not None:
            flags += sglang_speculation(folder, self.num_steps, cfg.topk, self.draft_tokens)
        return [*flags, *cfg.extra_args]

    def _asked(self, folder: Path | None) -> dict[str, Any]:
        asked: dict[str, Any] = {"model_path": str(self.target), "tp_size": self.cfg.tp, "disable_radix_cache": True}
        if self.cfg.dtype != "auto":
            asked["dtype"] = self.cfg.dtype
        if folder is None:
            return {**asked, "speculative_algorithm": None}
        return {**asked, **self._asked_speculation(), "speculative_draft_model_path": str(folder)}

    def _asked_speculation(self) -> dict[str, Any]:
        return {
            "speculative_algorithm": "EAGLE3",
            "speculative_num_steps": self.num_steps,
            "speculative_eagle_topk": self.cfg.topk,
            "speculative_num_draft_tokens": self.draft_tokens,
        }

    # Already running

    def _connect(self, url: str, wiring: Wiring | None) -> Session:
        http = JsonServer(url, self.cfg.request_timeout_s, self.cfg.retries, outage_s=self.cfg.outage_s)
        info = server_info(http)
        facts: dict[str, Any] = {"engine": self.name, "mode": "connected", "url": url, "build": info.get("version")}
        check_resolved(
            {"speculative_algorithm": None} if wiring is None else self._asked_speculation(),
            info,
            url,
            mend="restart that server with these values, or set eval.num_steps, eval.server.topk and "
            "eval.server.draft_tokens to its own",
        )
        check_name("the target", str(info.get("model_path", "")), self.target, url)
        if wiring is not None:
            tree = Path(self.cfg.tree) if self.cfg.tree else None
            version = str(info.get("version", ""))
            choice = choose_convention(self.cfg.convention, tree, version, self.target, wiring.model_type)
            said = str(info.get("speculative_draft_model_path") or "")
            facts |= joined_wiring(wiring, self.trained, self.served, choice, said, _ids_read, url)
        if info.get("disable_radix_cache") is not True:
            facts["prefix_cache"] = "on: prompts asked before are not computed again, so compare speeds with care"
        return self._session(http, info, facts, wiring)

    def _session(
        self, http: JsonServer, info: Mapping[str, Any], facts: dict[str, Any], wiring: Wiring | None
    ) -> Session:
        facts["resolved"] = {key: info[key] for key in REPORTED if key in info}
        facts["counters"] = COUNTERS
        steps = 0 if wiring is None else self.num_steps
        return SGLangSession(http, facts, steps, self.draft_tokens, _slots(info))


class SGLangSession:
    """A server that is up.

    Args:
        http: the server.
        facts: what is known of it.
        num_steps: proposals per verify; 0 = no draft.
        draft_tokens: tokens judged per verify.
        slots: requests it runs at once; 0 = it does not say.
    """

    def __init__(
        self, http: JsonServer, facts: dict[str, Any], num_steps: int, draft_tokens: int, slots: int = 0
    ) -> None:
        self.facts = facts
        self._http, self._steps, self._draft_tokens, self._slots = http, num_steps, draft_tokens, slots

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
        check_slots(self._slots, concurrency, self._http.url, "--max-running-requests")

        async def one(post: Callable[[str, Any], Awaitable[Any]], ask: Ask) -> Generation:
            sampling: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature}
            if temperature > 0:  # heeded by builds and back ends that sample deterministically
                sampling["sampling_seed"] = ask.seed
            began = time.perf_counter()
            answer = await post("/generate", {"input_ids": ask.prompt_ids, "sampling_params": sampling})
            return generation_from(answer, time.perf_counter() - began, self._steps, self._draft_tokens)

        return self._http.ask_all(prompts, one, concurrency, done)


def server_info(http: JsonServer) -> dict[str, Any]:
    """The server's resolved settings; `/get_server_info` is the older name.

    Raises:
        RedraftError: it gives none.
    """
    try:
        info = http.get("/server_info")
    except RedraftError as err:
        if "404" not in err.what:
            raise
        info = http.get("/get_server_info")
    if not isinstance(info, dict):
        why, mend = "/server_info is no JSON object", "give the address of an SGLang server"
        raise RedraftError("not an SGLang server", where=http.url, why=why, mend=mend)
    return info


def _slots(info: Mapping[str, Any]) -> int:
    states = info.get("internal_states")
    state = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    value = state.get("effective_max_running_requests_per_dp") or info.get("max_running_requests")
    return value if isinstance(value, int) else 0


def _ids_read(config: dict[str, Any]) -> list[int] | None:
    return (config.get("eagle_config") or {}).get(IDS)
