"""Faults in other tools' sample files, and in what a capture engine answers: named before a store is trusted."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from planted_bench import Bench, Fault, printed, refusal
from torch import Tensor

from data_prep.capture.sglang import SGLangCapture
from data_prep.capture.sglang_engine import EngineFacts, EnginePlan
from data_prep.capture.sglang_http import SGLangHTTPCapture, plan_servers
from data_prep.config import SGLangCaptureConfig
from data_prep.legacy.__main__ import main as legacy
from eagle3.conventions import convention
from eagle3.hf_states import all_site_states
from eagle3.wiring import Site, Wiring

WANTED = ("--aux", "layer_2,layer_4,layer_6", "--teacher", "final")
SOUND = ("layer_2", "layer_4", "layer_6", "final")
Edit = Callable[[list[Tensor]], list[Tensor]]


def _write(bench: Bench, *names: str, edit: Edit = lambda states: states, odd: Sequence[str] = ()) -> Path:
    """A speculators-v1 set of four samples whose list holds these sites; the last sample holds `odd`, if given."""
    out = bench.folder("samples")
    out.mkdir(parents=True)
    generator = torch.Generator().manual_seed(3)
    for place, tokens in enumerate((24, 9, 40, 17)):
        ids = torch.randint(5, 320, (tokens,), generator=generator)
        states = all_site_states(bench.model, ids)
        held = odd if odd and place == 3 else names
        listed = edit([states[name].bfloat16() for name in held])
        mask = (torch.arange(tokens) >= tokens // 3).long()
        torch.save({"input_ids": ids, "loss_mask": mask, "hidden_states": listed}, out / f"data_{place}.pt")
    return out


def _converted(bench: Bench, folder: Path) -> str:
    """`python -m data_prep.legacy convert` for the wiring that the set is believed to hold."""
    arguments = (folder, "--target", bench.target, "--store", bench.folder("store"), *WANTED)
    code, _, err = printed(legacy, "convert", *arguments)
    return err.strip() if code else ""


def _diagnosed(bench: Bench, folder: Path) -> str:
    """`python -m data_prep.legacy diagnose`: its reading, unless the set can be converted as it is."""
    code, out, err = printed(legacy, "diagnose", folder, "--target", bench.target)
    if code == 0 and "it can be converted as it is" in out and "twice" not in out:
        return ""
    lines = [line.strip() for line in out.splitlines()]
    told = [line for line in lines if line.startswith(("The tool", "Named"))]
    told += [line for line in lines if ": unknown" in line and "; it is" in line]
    told += [line for line in lines if "is not what the target's head reads" in line or "twice" in line]
    told += [line for line in lines if line.startswith("The set holds")]
    return " ".join([*told, err.strip()]).strip()


def _set(entry: Callable[[Bench, Path], str], *names: str, **more: Any) -> Callable[[Bench, bool], str]:
    return lambda bench, planted: entry(bench, _write(bench, *names, **more) if planted else _write(bench, *SOUND))


def _scaled(states: list[Tensor]) -> list[Tensor]:
    return [*states[:2], states[2] / 4, *states[3:]]


def _reversed_rows(states: list[Tensor]) -> list[Tensor]:
    return [state.flip(0) for state in states]


DIAGNOSE, CONVERT = "`data_prep.legacy diagnose`", "`data_prep.legacy convert`, before training"
FOREIGN = [
    Fault(
        "a foreign file with the embedding first and a layer last (how it all began)",
        DIAGNOSE,
        _set(_diagnosed, "embedding", "layer_2", "layer_4", "layer_6"),
        ("was fed embedding, layer_2, layer_4 and taught by layer_6", "not what the target's head reads"),
    ),
    Fault(
        "a foreign file whose teacher is normed already",
        DIAGNOSE,
        _set(_diagnosed, "layer_2", "layer_4", "layer_6", "final_normed"),
        ("normed twice",),
    ),
    Fault(
        "a foreign file one layer too late",
        CONVERT,
        _set(_converted, "layer_3", "layer_5", "layer_7", "final"),
        ("the set lacks a site", "it holds layer_3, layer_5, layer_7", "extract anew"),
    ),
    Fault(
        "a foreign file one layer too early",
        CONVERT,
        _set(_converted, "layer_1", "layer_3", "layer_5", "final"),
        ("the set lacks a site", "it holds layer_1, layer_3, layer_5"),
    ),
    Fault(
        "a foreign file with a partial sum in a slot",
        DIAGNOSE,
        _set(_diagnosed, *SOUND, edit=_scaled),
        ("hidden_states[2]: unknown, nearest layer_6", "times 1/4: a partial sum of 4 ranks"),
    ),
    Fault(
        "a foreign file of other tokens than its states",
        DIAGNOSE,
        _set(_diagnosed, *SOUND, edit=_reversed_rows),
        ("Named: none", "other tokens than those that the states were computed on"),
    ),
    Fault(
        "a foreign set with one file in another order",
        CONVERT,
        _set(_converted, *SOUND, odd=("embedding", "layer_2", "layer_4", "layer_6")),
        ("data_3.pt", "hidden_states[0] is embedding"),
    ),
]

# --- what the capture worker answers ---------------------------------------------------------------------------------

WORKER = Path(__file__).resolve().parents[1] / "unit" / "capture" / "fake_worker.py"
RECORDS = [("a", [5, 9, 3, 17], [0, 1, 1, 1]), ("b", [7, 8, 11], [1, 1, 1])]


def _captured(bench: Bench, mode: str, tp: int = 1) -> None:
    """Capture two records with the SGLang backend from a stand-in worker."""
    import fake_worker

    wiring = Wiring((Site(2), Site(3), Site(5)), "final", "llama", fake_worker.LAYERS, fake_worker.H)
    rule = convention("sglang-0.5.23")
    folder = bench.folder("capture")
    folder.mkdir(parents=True)
    with SGLangCapture(
        folder,
        wiring,
        EnginePlan(EngineFacts("0.5.23", Path()), rule, rule.render(wiring), "bfloat16", tp),
        SGLangCaptureConfig(timeout_s=20.0, start_timeout_s=20.0),
        vocab_size=64,
        log=folder / "sglang.log",
        command=[sys.executable, str(WORKER), mode],
    ) as capture:
        capture.run(RECORDS)


def _worker(mode: str, tp: int = 1) -> Callable[[Bench, bool], str]:
    return lambda bench, planted: refusal(partial(_captured, bench, mode if planted else "fine", tp))


def _server(
    change_info: Callable[[dict[str, Any]], Any] = lambda info: None,
    change_answer: Callable[[str, dict[str, Any]], dict[str, Any]] = lambda _host, meta: meta,
) -> Callable[[Bench, bool], str]:
    """Capture over HTTP from two stand-in servers."""

    def run(_bench: Bench, planted: bool) -> str:
        import test_capture_sglang_http as fakes

        servers = fakes.Servers()
        if planted:
            change_info(servers.info)
            servers.change = change_answer

        def capture() -> None:
            plan = plan_servers(fakes.CFG, fakes.WIRING, servers.client())
            one = SGLangHTTPCapture(
                fakes.WIRING, plan, fakes.CFG, vocab_size=64, final_norm=fakes.NORM, client=servers.client()
            )
            with contextlib.closing(one):
                one.run(fakes.RECORDS)

        return refusal(capture)

    return run


def _states(change: Callable[[list[Any]], list[Any]], only: str = "aux") -> Callable[[str, dict[str, Any]], dict]:
    return lambda host, meta: (
        {**meta, "hidden_states": [change(meta["hidden_states"][0])]} if host == only else dict(meta)
    )


FIRST_BATCH = "extract, on the first batch"
CAPTURE = [
    Fault(
        "a build that reads the ids one layer off",
        FIRST_BATCH,
        _worker("off_by_one"),
        ("slot 0 holds layer_1, expected layer_2", "capture.sglang.convention"),
    ),
    Fault(
        "rows fewer than tokens, as a cached prefix leaves",
        FIRST_BATCH,
        _worker("rows"),
        ("3 rows for 4 tokens", "--disable-radix-cache"),
    ),
    Fault(
        "partial sums: ranks that hold different states",
        FIRST_BATCH,
        _worker("partial_sums", tp=2),
        ("partial sums of the ranks", "--enforce-disable-flashinfer-allreduce-fusion"),
    ),
    Fault("a batch that returns another request's states", FIRST_BATCH, _worker("foreign"), ("another request",)),
    Fault("an engine that ran other tokens", FIRST_BATCH, _worker("other_tokens"), ("other tokens than it was given",)),
    Fault(
        "another release than the ids were written for",
        "extract, when the engine starts",
        _worker("other_version"),
        ("another SGLang than the ids were written for", "'0.5.9', expected '0.5.23'"),
    ),
    Fault(
        "a server that captures other layers than asked",
        "extract, before the first request",
        _server(lambda info: info["aux"].update(return_aux_hidden_state_layer_ids=[2, 3, 5])),
        ("[2, 3, 5]", "[1, 2, 4]"),
    ),
    Fault(
        "a server with a prefix cache",
        "extract, before the first request",
        _server(lambda info: info["aux"].update(disable_radix_cache=False)),
        ("fewer states than tokens", "--disable-radix-cache"),
    ),
    Fault(
        "a server that leaves a slot out",
        FIRST_BATCH,
        _server(change_answer=_states(lambda rows: [row[:16] for row in rows])),
        ("16 columns, expected 24",),
    ),
    Fault(
        "a teacher server whose states are not normed",
        FIRST_BATCH,
        _server(change_answer=_states(lambda rows: [[3 * x for x in row] for row in rows], only="last")),
        ("not those after the final norm",),
    ),
]
