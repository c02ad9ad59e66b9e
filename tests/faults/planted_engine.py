"""Faults in the engine: its source tree, what a server resolved, and what a live server really feeds."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import torch
from planted_bench import UNIT, Bench, Fault, Reached, edit_json, probed, quick_ends, refusal
from torch import Tensor

from eagle3.atomic import write_json
from eagle3.checkpoint import save_served
from eagle3.draft import DraftShape, Eagle3Draft
from eagle3.sglang_tree import patch, read_tree
from eagle3.vocab import build_draft_vocab
from eagle3.wiring import Site, Wiring
from eval.engines.process import free_port, server_process
from eval.engines.server_config import ServerConfig
from eval.engines.sglang import SGLangEngine

FAKE = UNIT / "engines" / "fake_sglang.py"
IDS = "eagle_aux_hidden_state_layer_ids"
TREE = "`eval.probe static`, before the server starts"
LAUNCH = "eval, before the server starts"
ANSWERS = "eval, before the first prompt"
LIVE = "`eval.probe live`"


def _kimi(*layers: int) -> Wiring:
    return Wiring(tuple(Site(k) for k in layers), "final", "kimi_k25", 61, 16)


def _draft(bench: Bench, wiring: Wiring, build: str) -> Path:
    """A small served folder for a Kimi-K2.5 of width 16."""
    folder = bench.folder("served")
    torch.manual_seed(0)
    rope = {"rope_theta": 10000.0, "rope_scaling": None}
    draft = Eagle3Draft(DraftShape(16, 32, 4, 2, 4, 40, 24, 3, 1e-6, rope, 128))
    vocab = build_draft_vocab(torch.arange(40), 24)
    draft.d2t.copy_(vocab.d2t)
    draft.t2d.copy_(vocab.t2d)
    save_served(folder, draft, wiring, target={}, convention_name=build, vocab=vocab)
    return folder


def _target(bench: Bench) -> Path:
    folder = bench.folder("kimi")
    folder.mkdir(parents=True)
    config = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25"}
    write_json(folder / "config.json", config)
    return folder


def _tree(bench: Bench, build: str = "new", **more: Any) -> Path:
    """An SGLang tree in miniature: `old` adds one to every id, `new` only where the first is 1."""
    from mini_sglang import ALWAYS, FIRST, mini_tree

    kinds: dict[str, Any] = {
        "old": {"rule": ALWAYS, "loop": "adds", "version": "0.5.10"},
        "new": {"rule": FIRST, "loop": "packer", "version": "0.5.23"},
    }
    where = bench.folder("site")
    return mini_tree(where, **{**kinds[build], **more})


# --- trees -----------------------------------------------------------------------------------------------------------


def _static(wiring: Wiring, right: str, wrong: str, tree: Callable[[Bench], Path]) -> Callable[[Bench, bool], str]:
    """A draft exported for the right or the wrong build, held against a tree."""

    def run(bench: Bench, planted: bool) -> str:
        return probed("static", tree(bench), "--draft", _draft(bench, wiring, wrong if planted else right))

    return run


def _first_is_one(bench: Bench, planted: bool) -> str:
    """Layers 1, 20, 40 as [1, 20, 40] by hand, where a first id of 1 adds one to all of them."""
    folder = _draft(bench, _kimi(1, 20, 40), "sglang-0.5.23")
    if planted:
        edit_json(folder / "config.json", lambda config: config["eagle_config"].update({IDS: [1, 20, 40]}))
    return probed("static", _tree(bench), "--draft", folder)


# Each part of the patch as it stands in a patched source, and what is left when it is taken away.
HALVES = {
    "default": (r" +self\.capture_embedding_for_eagle3 = False\n", ""),
    "setter": (r" +self\.model\.capture_embedding_for_eagle3 = bool(?s:.*?) return\n", ""),
    "forward": (r" +if self\.capture_embedding_for_eagle3 (?s:.*?)clone\(\)\)\n", ""),
}


def _half(tree: Path, part: str) -> Path:
    """Apply the embedding patch, then take one of its parts away again."""
    from mini_sglang import model_file

    patch.apply(read_tree(tree))
    if part:
        source = model_file(tree)
        text, taken = re.subn(*HALVES[part], source.read_text(encoding="utf-8"))
        assert taken
        source.write_text(text, encoding="utf-8")
    return tree


def _half_patched(part: str) -> Callable[[Bench, bool], str]:
    def run(bench: Bench, planted: bool) -> str:
        tree = _half(_tree(bench, "old"), part if planted else "")
        return probed("static", tree, "--draft", _draft(bench, _kimi(0, 3, 31), "sglang-0.5.9-patched"))

    return run


def _late_graphs(bench: Bench, planted: bool) -> str:
    tree = _tree(bench, "old", graphs="late" if planted else "early")
    return probed("static", tree, "--draft", _draft(bench, _kimi(3, 31, 59), "sglang-0.5.9"))


TREES = [
    Fault(
        "ids written for an old build, served on a new one",
        TREE,
        _static(_kimi(3, 31, 59), "sglang-0.5.23", "sglang-0.5.9", lambda bench: _tree(bench, "new")),
        ("ids [2, 30, 58]", "off by one layer", "export.convention=sglang-0.5.23"),
    ),
    Fault(
        "ids written for a new build, served on an old one",
        TREE,
        _static(_kimi(3, 31, 59), "sglang-0.5.9", "sglang-0.5.23", lambda bench: _tree(bench, "old")),
        ("ids [3, 31, 59]", "off by one layer"),
    ),
    Fault(
        "[-1, 2, 30] for a patched build, on an unpatched one",
        TREE,
        lambda bench, planted: probed(
            "static",
            _tree(bench, "old") if planted else _half(_tree(bench, "old"), ""),
            "--draft",
            _draft(bench, _kimi(0, 3, 31), "sglang-0.5.9-patched"),
        ),
        ("cannot feed embedding, layer_3, layer_31", "sglang_patch.py apply"),
    ),
    Fault("a first id of 1, which shifts all ids", TREE, _first_is_one, ("slot 0 holds layer 2; expected layer 1",)),
    *(
        Fault(
            f"a tree patched by half: no {part}",
            TREE,
            _half_patched(part),
            ("the embedding patch is there by half", f"{part}: MISSING OR WRONG", "sglang_patch.py verify"),
        )
        for part in HALVES
    ),
    Fault(
        "CUDA graphs captured before the ids are set",
        TREE,
        _late_graphs,
        ("captures CUDA graphs with its default layers", "--disable-cuda-graph"),
    ),
]

# --- servers ---------------------------------------------------------------------------------------------------------


def _serve(engine: SGLangEngine, wiring: Wiring) -> str:
    def serve() -> None:
        with engine.serve(wiring):
            raise Reached

    with quick_ends():
        return refusal(serve, reaches=True)


def _launched(
    bench: Bench, *, tree: Path, build: str = "auto", wiring: Wiring | None = None, fault: str = "none"
) -> str:
    """Start a stand-in server through the adapter, with the SGLang of `tree` installed."""
    wiring = wiring or _kimi(3, 31, 59)
    cfg = ServerConfig(convention=build, start_timeout_s=60.0, env={"PYTHONPATH": str(tree.parent)})
    engine = SGLangEngine(
        _target(bench),
        _draft(bench, wiring, "sglang-0.5.9-patched"),
        wiring,
        3,
        cfg,
        bench.folder("work"),
        command=lambda python, flags: [python, str(FAKE), *flags, "--fault", fault],
    )
    return _serve(engine, wiring)


def _named_build(bench: Bench, planted: bool) -> str:
    return _launched(bench, tree=_tree(bench, "new" if planted else "old"), build="sglang-0.5.9")


def _named_half(bench: Bench, planted: bool) -> str:
    tree = _half(_tree(bench, "old"), "forward" if planted else "")
    return _launched(bench, tree=tree, build="sglang-0.5.9-patched", wiring=_kimi(0, 3, 31))


def _other_values(bench: Bench, planted: bool) -> str:
    return _launched(bench, tree=_tree(bench), fault="other_values" if planted else "none")


@contextlib.contextmanager
def _running(bench: Bench, target: Path, draft: Path) -> Iterator[str]:
    """A stand-in server that others have started."""
    port = free_port("127.0.0.1")
    url = f"http://127.0.0.1:{port}"
    flags = ["--host", "127.0.0.1", "--port", str(port), "--model-path", str(target), "--speculative-algorithm"]
    flags += ["EAGLE3", "--speculative-draft-model-path", str(draft), "--speculative-num-steps", "3"]
    flags += ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"]
    command = [sys.executable, str(FAKE), *flags]
    log = bench.folder("server.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with quick_ends(), server_process("stand-in", command, url, log) as server:
        server.wait_ready("/health", 60.0)
        yield url


def _joined(bench: Bench, *, steps: int = 3, build: str = "sglang-0.5.23", other: str = "") -> str:
    """Join a running server whose draft was exported for `build`; `other` renames the draft's folder."""
    target, wiring = _target(bench), _kimi(3, 31, 59)
    draft = _draft(bench, wiring, build)
    said = Path("/models") / other if other else draft
    with _running(bench, target, said) as url:
        engine = SGLangEngine(target, draft, wiring, steps, ServerConfig(url=url), bench.folder("work"))
        return _serve(engine, wiring)


SERVERS = [
    Fault(
        "a build named that is not the one installed",
        LAUNCH,
        _named_build,
        ("another build than this one", "off by one layer", "eval.server.convention=auto"),
    ),
    Fault(
        "a half-patched build, named as patched",
        LAUNCH,
        _named_half,
        ("the embedding patch by half", "forward: MISSING OR WRONG"),
    ),
    Fault(
        "a server that resolved other steps than asked",
        ANSWERS,
        _other_values,
        ("speculative_num_draft_tokens is 2, asked 4",),
    ),
    Fault(
        "a running server with other steps",
        ANSWERS,
        lambda bench, planted: _joined(bench, steps=2 if planted else 3),
        ("speculative_num_steps is 3, asked 2",),
    ),
    Fault(
        "a running server with another draft",
        ANSWERS,
        lambda bench, planted: _joined(bench, other="older_draft" if planted else ""),
        ("the draft of that server has another name", "older_draft"),
    ),
    Fault(
        "a running server whose draft has the ids of another build",
        ANSWERS,
        lambda bench, planted: _joined(bench, build="sglang-0.5.9" if planted else "sglang-0.5.23"),
        ("slot 0 holds layer 2; expected layer 3", "[2, 30, 58]"),
    ),
]

# --- what a live server feeds ----------------------------------------------------------------------------------------


def _live(**options: Any) -> Callable[[Bench, bool], str]:
    """Probe a server that captures with the default wiring, sound or with these faults."""

    def run(bench: Bench, planted: bool) -> str:
        from probe_fakes import FakeServer

        import eval.probe.server as probe_server

        chosen = {name: value(bench) if name == "feed" else value for name, value in options.items()}
        server = FakeServer(bench.model, **(chosen if planted else {}))  # by itself it feeds the default wiring
        real = httpx.Client
        transport = httpx.MockTransport(server.answer)
        with mock.patch.object(probe_server.httpx, "Client", lambda **_: real(transport=transport)):
            return probed(
                *("live", "--url", "http://server:30000", "--target", bench.target, "--wiring", "native"),
                *("--prompts", 3, "--max-tokens", 24, "--random-tokens"),
            )

    return run


def _sites(*names: str) -> Callable[[Bench], Any]:
    from probe_fakes import feed_sites

    return lambda _bench: feed_sites(*names)


def _partial(bench: Bench) -> Any:
    from probe_fakes import partial_sum

    part = partial_sum(bench.model, 4, 2)

    def feed(states: dict[str, Tensor], ids: list[int]) -> Tensor:
        return torch.cat([states["layer_2"], part(ids), states["layer_5"]], dim=-1)

    return feed


def _cached(answer: dict[str, Any]) -> None:
    answer["meta_info"]["hidden_states"][0] = answer["meta_info"]["hidden_states"][0][5:]
    answer["meta_info"]["cached_tokens"] = 5


def _mixed(answers: list[Any]) -> list[Any]:
    return [answers[1], answers[0], *answers[2:]]


LIVE_FEEDS = [
    Fault(
        "a live server that feeds the embedding first",
        LIVE,
        _live(feed=_sites("embedding", "layer_2", "layer_4")),
        ("the server feeds embedding, layer_2, layer_4", "slot 0 was trained on layer 2"),
    ),
    Fault(
        "a live server one layer late",
        LIVE,
        _live(feed=_sites("layer_3", "layer_5", "layer_6")),
        ("the server feeds layer_3, layer_5, layer_6", "slot 0 was trained on layer 2; the server feeds layer 3"),
    ),
    Fault(
        "a live server one layer early",
        LIVE,
        _live(feed=_sites("layer_1", "layer_3", "layer_4")),
        ("the server feeds layer_1, layer_3, layer_4",),
    ),
    Fault(
        "a live server with its slots permuted",
        LIVE,
        _live(feed=_sites("layer_5", "layer_4", "layer_2")),
        ("the server feeds layer_5, layer_4, layer_2",),
    ),
    Fault(
        "a live server that feeds the last layer's output",
        LIVE,
        _live(feed=_sites("layer_2", "layer_4", "final")),
        ("slot 2 was trained on layer 5; the server feeds final",),
    ),
    Fault(
        "a live server that feeds one rank's partial sum",
        LIVE,
        _live(feed=_partial, info={"tp_size": 2}),
        ("the server feeds partial sums", "all-reduce"),
    ),
    Fault(
        "a live server that hides the rows of a cached prefix",
        LIVE,
        _live(edit=_cached, info={"disable_radix_cache": False}),
        ("prefix cache held 5", "--disable-radix-cache"),
    ),
    Fault(
        "a live server that mixes up the requests of a batch",
        LIVE,
        _live(batch_edit=_mixed),
        ("mixes up requests of one batch",),
    ),
]

FAULTS = [*TREES, *SERVERS, *LIVE_FEEDS]
