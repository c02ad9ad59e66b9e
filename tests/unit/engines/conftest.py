"""A small served folder, a target's folder without weights, and a stand-in server behind the real launch path."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_fakes import FAKE, HIDDEN, STEPS, TRAINED, VOCAB

from eagle3.checkpoint import save_served
from eagle3.draft import DraftShape, Eagle3Draft
from eagle3.patience import Backoff
from eagle3.vocab import build_draft_vocab
from eval.engines.server_config import ServerConfig
from eval.engines.sglang import SGLangEngine


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft's folder, exported for SGLang 0.5.23."""
    folder = tmp_path_factory.mktemp("run") / "served"
    torch.manual_seed(0)
    rope = {"rope_theta": 10000.0, "rope_scaling": None}
    draft = Eagle3Draft(DraftShape(HIDDEN, 32, 4, 2, 4, VOCAB, 24, 3, 1e-6, rope, 128))
    for parameter in draft.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    vocab = build_draft_vocab(torch.arange(VOCAB), 24)
    draft.d2t.copy_(vocab.d2t)
    draft.t2d.copy_(vocab.t2d)
    save_served(folder, draft, TRAINED, target={}, convention_name="sglang-0.5.23", vocab=vocab)
    return folder


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target's folder: the stand-in server loads nothing from it."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    return folder


@pytest.fixture(scope="session")
def site_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an installed `sglang` 0.5.9 that must not be imported."""
    root = tmp_path_factory.mktemp("site")
    (root / "sglang").mkdir()
    (root / "sglang" / "__init__.py").write_text("raise SystemExit('imported')\n")
    info = root / "sglang-0.5.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.9\n")
    return root


@pytest.fixture
def make_engine(served: Path, target: Path, site_packages: Path, tmp_path: Path) -> Callable[..., SGLangEngine]:
    """`make_engine("--fault", "hangs", retries=0)`: an engine that starts the stand-in with these further flags."""

    def make(*fake_flags: str, num_steps: int = STEPS, **settings: Any) -> SGLangEngine:
        cfg = ServerConfig(
            **{
                "convention": "sglang-0.5.23",
                "start_timeout_s": 60.0,
                "env": {"PYTHONPATH": str(site_packages)},
                **settings,
            }
        )
        return SGLangEngine(
            target,
            served,
            TRAINED,
            num_steps,
            cfg,
            tmp_path / "work",
            command=lambda python, flags: [python, str(FAKE), *flags, *fake_flags],
        )

    return make


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry after moments; an ended server's stragglers are killed soon."""
    monkeypatch.setattr("eval.engines.client.BACKOFF", Backoff(0.02))
    monkeypatch.setattr("eval.engines.process.GRACE_S", 1.0)
    monkeypatch.setattr("eval.engines.process.POLL_S", 0.05)
