"""A tiny target, a stand-in for an SGLang server that feeds it with planted faults, stores and drafts made from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from probe_fakes import FakeServer, make_fitted_draft, make_store
from torch import Tensor, nn

import eval.probe.server as server_module
from eagle3.hf_model import load_target
from eagle3.hf_states import all_site_states
from eagle3.target_weights import TargetWeights
from eagle3.wiring import Site, Wiring
from eval.probe.__main__ import main


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target(tiny_llama_path: Path) -> Path:
    return tiny_llama_path


@pytest.fixture(scope="session")
def model(target: Path) -> nn.Module:
    return load_target(target, "cpu", torch.float32, with_head=True)


@pytest.fixture(scope="session")
def states(model: nn.Module) -> Callable[[Sequence[int]], dict[str, Tensor]]:
    return lambda ids: all_site_states(model, ids)


@pytest.fixture(scope="session")
def wire(target: Path) -> Callable[..., Wiring]:
    """`wire(2, 4, 5)`: a wiring of the tiny target."""
    one = TargetWeights(target).identity()

    def make(*layers: int, teacher: str = "final") -> Wiring:
        aux = tuple(Site(k) for k in layers)
        return Wiring(aux, teacher, one.model_type, one.num_layers, one.hidden_size)

    return make


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, model: nn.Module) -> Callable[..., FakeServer]:
    """`serve(url=..., **faults)`: from now on requests to that address are answered by this stand-in."""
    servers: dict[str, FakeServer] = {}

    def answer(request: httpx.Request) -> httpx.Response:
        key = f"{request.url.scheme}://{request.url.host}:{request.url.port}"
        if key not in servers:
            raise httpx.ConnectError("connection refused")
        return servers[key].answer(request)

    real = httpx.Client

    def client(**_options: Any) -> httpx.Client:
        return real(transport=httpx.MockTransport(answer))

    monkeypatch.setattr(server_module.httpx, "Client", client)

    def make(url: str = "http://fake:30000", **options: Any) -> FakeServer:
        servers[url] = FakeServer(model, **options)
        return servers[url]

    return make


@pytest.fixture
def probe(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, dict[str, Any]]]:
    """`probe("live", ...)` runs the command with --json: exit code and what it printed."""

    def run(*args: Any) -> tuple[int, dict[str, Any]]:
        capsys.readouterr()
        code = main([str(arg) for arg in args] + ["--json"])
        return code, json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def store(tmp_path: Path, target: Path, model: nn.Module) -> Callable[..., Path]:
    def make(wiring: Wiring, name: str = "store", **options: Any) -> Path:
        return make_store(tmp_path / name, target, model, wiring, **options)

    return make


@pytest.fixture
def fitted(tmp_path: Path, target: Path, model: nn.Module) -> Callable[..., Path]:
    def make(trained: Wiring, **options: Any) -> Path:
        return make_fitted_draft(tmp_path / "served", target, model, trained, **options)

    return make
