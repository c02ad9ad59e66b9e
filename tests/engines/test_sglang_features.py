"""Every site that the real SGLang can feed, against the states that extraction puts into a store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from torch import Tensor

from data_prep.capture.hf import HFCapture
from eagle3.conventions import convention
from eagle3.site_match import match_slots
from eagle3.wiring import Site, Wiring
from eval.engines.process import free_port, server_process

HOST = "127.0.0.1"
TEXTS = [[5, 9, 17, 33, 101, 7, 45, 12], [200, 300, 30, 55, 66, 77, 88, 99, 12, 13, 150]]


def every_site(model_type: str, num_layers: int, hidden: int) -> Wiring:
    """All inputs of layers that the server's flag can name; it takes no negative id, so not Llama's embedding."""
    first = 0 if model_type == "deepseek_v3" else 1
    return Wiring(tuple(Site(k) for k in range(first, num_layers)), "final", model_type, num_layers, hidden)


@pytest.fixture(params=["deepseek", "llama"])
def case(request: pytest.FixtureRequest, tiny_kimi_path: Path, tiny_llama_path: Path) -> tuple[Path, Wiring]:
    if request.param == "deepseek":
        return tiny_kimi_path, every_site("deepseek_v3", 61, 64)
    return tiny_llama_path, every_site("llama", 8, 64)


@pytest.fixture
def url(
    case: tuple[Path, Wiring], sglang_python: Path, sglang_env: dict[str, str], sglang_args: list[str], tmp_path: Path
) -> Iterator[str]:
    target, wiring = case
    ids = convention("sglang-0.5.23").render(wiring)
    port = free_port(HOST)
    command = [str(sglang_python), "-m", "sglang.launch_server", "--model-path", str(target), "--dtype", "float32"]
    command += ["--host", HOST, "--port", str(port), "--skip-tokenizer-init", *sglang_args]
    command += ["--disable-radix-cache", "--chunked-prefill-size", "-1"]
    command += ["--enable-return-aux-hidden-states", "--speculative-algorithm", "EAGLE3"]
    command += ["--return-aux-hidden-state-layer-ids", *map(str, ids)]
    address = f"http://{HOST}:{port}"
    with server_process("SGLang", command, address, tmp_path / "server.log", sglang_env) as server:
        server.wait_ready("/health", 600)
        yield address


def fed(url: str, ids: list[int]) -> Tensor:
    """`[T, sites * H]` as the server hands them to a draft."""
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0}, "return_hidden_states": True}
    answer = httpx.post(f"{url}/generate", json=body, timeout=300.0, trust_env=False).json()
    return torch.tensor(answer["meta_info"]["hidden_states"][0])


def test_every_site_is_the_stored_one(case: tuple[Path, Wiring], url: str) -> None:
    target, wiring = case
    capture = HFCapture(target, wiring, device="cpu", compute_dtype="float32")
    for ids in TEXTS:
        (sample,) = capture.run([("one", ids, [1] * len(ids))])
        states = fed(url, ids)
        assert states.shape == (len(ids), len(wiring.aux) * wiring.hidden_size)
        slots = dict(zip(wiring.names, states.split(wiring.hidden_size, dim=-1), strict=True))
        for name, stored in sample.sites.items():
            cosine = torch.cosine_similarity(slots[name], stored.float(), dim=-1)
            assert float(cosine.min()) > 0.999, name
            assert torch.equal(slots[name].to(torch.bfloat16), stored) or _rounding(slots[name], stored), name
        reference = {name: stored.float() for name, stored in sample.sites.items()}
        named = match_slots(torch.cat([slots[name] for name in reference], dim=-1), reference, wiring.hidden_size)
        assert [one.site for one in named] == list(reference)


def _rounding(fed_states: Tensor, stored: Tensor) -> bool:
    """Apart by the store's own rounding to bfloat16 (8 bits) and no more."""
    return float((fed_states - stored.float()).norm() / fed_states.norm()) < 2**-8
