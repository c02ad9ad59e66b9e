"""What the adapters of started and joined servers share: the launch, and comparing what was asked with what is said."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from eagle3.atomic import read_json
from eagle3.conventions import convention
from eagle3.errors import ConfigError, RedraftError, WiringError
from eagle3.wiring import Wiring
from eval.engines.base import Session
from eval.engines.client import JsonServer
from eval.engines.process import free_port, server_process
from eval.engines.server_config import ServerConfig
from eval.engines.sglang_build import Choice
from eval.engines.target import check_served

# How the counters of SGLang and vLLM were read, for whoever reads the results.
COUNTERS = "each verify counted whole; what it kept past an end token is taken off again"
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class ServerAdapter:
    """An engine that is a server: joined where the configuration names a URL, else started.

    Args:
        target: folder of the target.
        served: folder of the draft.
        trained: wiring that the draft was trained on.
        num_steps: proposals per verify.
        cfg: how to reach or start the server.
        work_dir: for the temporary folder and, without `cfg.log_dir`, the logs.
        trust_remote_code: let the server run Python shipped in the target's folder.

    Raises:
        ConfigError: a bad setting.
    """

    def __init__(
        self,
        target: Path,
        served: Path,
        trained: Wiring,
        num_steps: int,
        cfg: ServerConfig,
        work_dir: Path,
        trust_remote_code: bool = False,
    ) -> None:
        cfg.validate()
        self.target, self.served = Path(target).resolve(), Path(served).resolve()
        self.trained, self.num_steps, self.cfg = trained, num_steps, cfg
        self.work_dir, self.trust_remote_code = Path(work_dir), trust_remote_code

    @contextlib.contextmanager
    def serve(self, wiring: Wiring | None) -> Iterator[Session]:
        """A server that feeds the draft `wiring`; None = no draft. A started one is stopped on leaving.

        Raises:
            RedraftError: it does not start, is not reached, or serves something else than asked.
            WiringError: this engine cannot feed the wiring.
        """
        if wiring is not None:
            check_served(wiring, self.trained.feature_width)
        url = url_for(self.cfg, wiring)
        if url:
            yield self._connect(url, wiring)
        else:
            with self._launch(wiring) as session:
                yield session

    def _connect(self, url: str, wiring: Wiring | None) -> Session:
        raise NotImplementedError

    def _launch(self, wiring: Wiring | None) -> AbstractContextManager[Session]:
        raise NotImplementedError


@contextlib.contextmanager
def launched(
    name: str,
    wiring: Wiring | None,
    cfg: ServerConfig,
    command: Callable[[int], Sequence[str]],
    work_dir: Path,
    env: Mapping[str, str],
) -> Iterator[tuple[JsonServer, dict[str, Any]]]:
    """A started server that answers `/health`, with its command, log and URL.

    Args:
        name: of the engine; names the log too.
        wiring: what it will feed; names the log.
        cfg: where it listens, and how long to wait.
        command: builds the command line for a port.
        work_dir: for the log, unless `cfg.log_dir` says otherwise.
        env: added to its environment; `cfg.env` goes before it.

    Raises:
        RedraftError: it does not come up.
    """
    port = cfg.port or free_port(cfg.host)
    url = f"http://[{cfg.host}]:{port}" if ":" in cfg.host else f"http://{cfg.host}:{port}"
    log = Path(cfg.log_dir or work_dir) / f"{name}-{_label(wiring)}.log"
    words = list(command(port))
    # Unbuffered, for a log that breaks off in a buffer names no error.
    with server_process(name, words, url, log, {"PYTHONUNBUFFERED": "1", **env, **cfg.env}) as server:
        server.wait_ready("/health", cfg.start_timeout_s)
        http = JsonServer(url, cfg.request_timeout_s, cfg.retries, server.died, cfg.outage_s)
        yield http, {"mode": "launched", "command": words, "log": str(log), "url": url}


def _label(wiring: Wiring | None) -> str:
    return "plain" if wiring is None else "-".join(site.name.replace("layer_", "") for site in wiring.aux)


def url_for(cfg: ServerConfig, wiring: Wiring | None) -> str:
    """The running server to use for this way of serving; empty = start one.

    Raises:
        ConfigError: plain decoding is asked of a server that speculates.
    """
    if wiring is None and cfg.url and not cfg.baseline_url:
        raise ConfigError(
            "plain decoding needs a server without a draft",
            where="eval.server.baseline_url",
            why="only eval.server.url is set, and that server speculates",
            mend="start one and name it there, or set eval.baseline=false",
            page="engines",
        )
    return cfg.baseline_url if wiring is None else cfg.url


def check_resolved(
    asked: Mapping[str, Any],
    said: Mapping[str, Any],
    where: str,
    mend: str = "read the server's log for what it adjusted, and ask for values that this build takes as they are",
) -> None:
    """Compare every value asked for with the one the server says it runs with.

    Raises:
        RedraftError: naming all that differ.
    """
    differing = [f"{key} is {said.get(key)!r}, asked {want!r}" for key, want in asked.items() if said.get(key) != want]
    if differing:
        why = "; ".join(differing)
        raise RedraftError(
            "the server runs with other values than asked", where=where, why=why, mend=mend, page="engines"
        )


def check_name(what: str, found: str, expected: Path, url: str) -> None:
    """Compare folder names; the whole paths may differ between the server's machine and this one.

    Raises:
        RedraftError: they are named otherwise.
    """
    if Path(found).name != expected.name:
        raise RedraftError(
            f"{what} of that server has another name",
            where=url,
            why=f"found {found!r}, expected a folder named {expected.name!r}",
            mend="connect to the server of this model, or name the folders alike",
        )


def wiring_facts(wiring: Wiring, choice: Choice, ids: list[int] | None) -> dict[str, Any]:
    """What a result should keep about the ids."""
    return {
        "wiring": wiring.names,
        "convention": choice.name,
        "convention_from": choice.source,
        "ids": ids,
        "note": convention(choice.name).note(wiring.model_type),
    }


def joined_wiring(
    wiring: Wiring,
    trained: Wiring,
    served: Path,
    choice: Choice,
    said: str,
    read_ids: Callable[[dict[str, Any]], list[int] | None],
    url: str,
) -> dict[str, Any]:
    """What can be known of the ids that a running server reads: its draft's `config.json`, where that path is ours too.

    Args:
        wiring: asked for.
        trained: what the draft was trained on.
        served: the draft's folder.
        choice: that server's convention.
        said: path of the draft, as the server gives it; "" = it does not say.
        read_ids: where in a `config.json` this engine looks for ids.
        url: of the server.

    Raises:
        WiringError: those ids feed other sites, or cannot be seen and another wiring than the trained is asked.
        RedraftError: it serves a draft of another name.
    """
    if said and (Path(said) / "config.json").is_file():
        ids = read_ids(read_json(Path(said) / "config.json"))
        wiring.check_same(
            convention(choice.name).parse_like(ids, wiring, wiring.teacher),
            where=f"{url}, draft {said}, ids {ids} as {choice.name} reads them",
            mend="serve a draft folder whose ids are written for this build, or leave eval.server.url empty",
        )
        return {**wiring_facts(wiring, choice, ids), "ids_seen": f"in {Path(said) / 'config.json'} on this machine"}
    if said:
        check_name("the draft", said, served, url)
    if wiring != trained:
        raise WiringError(
            "a running server feeds one wiring, and which one cannot be seen from here",
            where=url,
            why=f"asked for {', '.join(wiring.names)}; its draft's folder {said} is not on this machine"
            if said
            else "it does not say where its draft's folder is",
            mend="set eval.serve=[matched], or leave eval.server.url empty to start servers here",
        )
    unseen = "no: the ids that server reads are unverified; `python -m eval.probe live` measures what it feeds"
    return {**wiring_facts(wiring, choice, None), "ids_seen": unseen}


def check_slots(slots: int, concurrency: int, url: str, flag: str) -> None:
    """Refuse a batch that the server would run in pieces (`slots` 0 = it does not say how many it runs at once).

    Raises:
        ConfigError: naming both numbers.
    """
    if slots and concurrency > slots:
        raise ConfigError(
            "the server runs fewer requests at once",
            where="eval.batch_sizes",
            why=f"asked for {concurrency} at a time, {url} runs {slots}",
            mend=f"lower eval.batch_sizes, or start the server with a larger {flag}",
        )
