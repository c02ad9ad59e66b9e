"""The SGLang backend against the real engine: the same states as the Hugging Face backend's, site by site.

In float32 two programs that read the same tensor agree to rounding (1e-6 here), and neighbouring layers differ by far
more, so agreement leaves no room for another site. In bfloat16, as targets are served, cosines say the same.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import httpx
import pytest
import torch
from tiny_models import HIDDEN, LAYERS, VOCAB, make_target

from data_prep.capture.hf import HFCapture
from data_prep.capture.sample import CapturedSample
from data_prep.capture.sglang import SGLangCapture
from data_prep.capture.sglang_engine import EnginePlan, plan_engine
from data_prep.capture.sglang_http import SGLangHTTPCapture, plan_servers
from data_prep.config import SGLangCaptureConfig
from data_prep.extract import extract
from data_prep.store import Store, StoreManifest
from eagle3.errors import RedraftError, WiringError
from eagle3.target_weights import TargetWeights
from eagle3.wiring import Site, Wiring

ROOT = Path(__file__).resolve().parents[2]
WIRING = Wiring((Site(0), Site(2), Site(5)), "final", "llama", LAYERS, HIDDEN)
LAYERS_ONLY = Wiring((Site(2), Site(4), Site(5)), "final_normed", "llama", LAYERS, HIDDEN)
LENGTHS = [40, 3, 17, 1, 29, 8]


def records(lengths: list[int] = LENGTHS) -> list[tuple[str, list[int], list[int]]]:
    gen = torch.Generator().manual_seed(0)
    return [
        (f"r{i}", torch.randint(4, VOCAB, (n,), generator=gen).tolist(), [0] + [1] * (n - 1))
        for i, n in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("capture") / "target")


@pytest.fixture(scope="module")
def config(sglang_python: Path, sglang_env: dict[str, str], sglang_args: list[str]) -> SGLangCaptureConfig:
    args = [flag for flag in sglang_args if not flag.startswith("--speculative")]
    return SGLangCaptureConfig(
        python=str(sglang_python), env=sglang_env, extra_args=args, start_timeout_s=900, timeout_s=600
    )


def start(target: Path, wiring: Wiring, cfg: SGLangCaptureConfig, dtype: str, log: Path, **plan: Any) -> SGLangCapture:
    weights = TargetWeights(target)
    settled = replace(plan_engine(cfg, wiring, dtype, "bfloat16"), **plan)
    return SGLangCapture(
        target,
        wiring,
        settled,
        cfg,
        vocab_size=VOCAB,
        log=log,
        embed=lambda tokens: weights.embedding()[tokens],
        out_dtype=torch.float32,
    )


@pytest.fixture(scope="module")
def capture(
    target: Path, config: SGLangCaptureConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SGLangCapture]:
    with start(target, WIRING, config, "float32", tmp_path_factory.mktemp("log") / "float32.log") as one:
        yield one


def named(sample: CapturedSample) -> dict[str, torch.Tensor]:
    return {**sample.sites, "final": sample.final}


def by_site(samples: list[CapturedSample]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([named(one)[name] for one in samples]) for name in named(samples[0])}


def reference(target: Path, wiring: Wiring, dtype: str) -> dict[str, torch.Tensor]:
    hf = HFCapture(target, wiring, device="cpu", compute_dtype=dtype, out_dtype=torch.float32)
    return by_site(hf.run(records()))


def test_every_site_equals_the_reference_backend(capture: SGLangCapture, target: Path) -> None:
    assert capture.facts["dtype"] == "float32" and capture.plan.ids == [-1, 1, 4]
    samples = capture.run(records())
    for (record_id, tokens, _), one in zip(records(), samples, strict=True):
        assert (one.record_id, one.input_ids.tolist(), one.tokens) == (record_id, tokens, len(tokens))
    want = reference(target, WIRING, "float32")
    found = by_site(samples)
    assert found.keys() == want.keys() == {"layer_2", "layer_5", "final"}
    for name, state in want.items():
        assert ((found[name] - state).norm() / state.norm()).item() < 1e-4, name


def test_the_same_batch_twice_gives_the_same_bits(capture: SGLangCapture) -> None:
    first, second = capture.run(records()), capture.run(records())
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(state, named(other)[name]) for name, state in named(one).items())


def test_company_does_not_change_a_record(capture: SGLangCapture) -> None:
    """Nothing of an earlier prefill or of another request reaches a record."""
    together = capture.run(records())
    for record, one in list(zip(records(), together, strict=True))[::-1]:
        (alone,) = capture.run([record])
        for name, state in named(one).items():
            torch.testing.assert_close(named(alone)[name], state, atol=1e-4, rtol=1e-4)


def ranks_of(worker: int) -> list[int]:
    """Process ids of the worker's ranks other than 0."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
            spawned = b"spawn_main" in (path / "cmdline").read_bytes()
        except (OSError, ValueError):
            continue
        if parent == worker and spawned:
            found.append(int(path.name))
    return found


def test_two_ranks_in_bfloat16_agree_with_each_other_and_the_reference(
    target: Path, config: SGLangCaptureConfig, tmp_path: Path
) -> None:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("two ranks need two CPU cores")
    cfg = replace(config, tp=2, env={**config.env, "SGLANG_CPU_OMP_THREADS_BIND": "0|1"})
    with start(target, LAYERS_ONLY, cfg, "auto", tmp_path / "log") as one:
        assert one.facts["dtype"] == "bfloat16"
        found = by_site(one.run(records()))
        ranks = ranks_of(one.worker.pid)
        assert len(ranks) == 1
        os.kill(ranks[0], signal.SIGKILL)
        with pytest.raises(RedraftError, match="rank 1 died with exit code -9"):
            one.run(records())
    for name, state in reference(target, LAYERS_ONLY, "float32").items():
        assert torch.cosine_similarity(found[name], state, dim=1).min().item() > 0.999, name


def test_ids_of_another_convention_are_found_out_on_the_first_batch(
    target: Path, config: SGLangCaptureConfig, tmp_path: Path
) -> None:
    """`[2, 4, 5]` are the sites' own numbers, and this build adds one to each."""
    with (
        start(target, LAYERS_ONLY, config, "float32", tmp_path / "log", ids=[2, 4, 5]) as one,
        pytest.raises(WiringError) as error,
    ):
        one.run(records())
    line = str(error.value)
    for words in ("slot 0 holds layer_3, expected layer_2", "slot 2 holds layer_6", "capture.sglang.convention"):
        assert words in line


def prepared() -> datasets.Dataset:
    rows = list(zip(*records(LENGTHS * 4), strict=True))
    return datasets.Dataset.from_dict(dict(zip(("record_id", "input_ids", "loss_mask"), map(list, rows), strict=True)))


def fill(target: Path, cfg: SGLangCaptureConfig, store: Path, log: Path, pause: float = 0.0) -> Any:
    """Extract into `store`; run in a child process by the test that kills it."""
    with start(target, WIRING, cfg, "float32", log) as one:
        return fill_from(one, store, pause)


def fill_from(one: SGLangCapture, store: Path, pause: float = 0.0) -> Any:
    def slowed(batch: Any) -> list[CapturedSample]:
        time.sleep(pause)
        return SGLangCapture.run(one, batch)

    one.run = slowed  # type: ignore[method-assign]
    try:
        manifest = StoreManifest(WIRING, {"name": "tiny"}, "tok", "tpl", dtype="float32", capture=one.info)
        return extract(prepared(), one, store, manifest, batch_tokens=48, shard_tokens=64)
    finally:
        del one.run


def test_a_killed_extraction_goes_on_and_loses_nothing(
    capture: SGLangCapture, target: Path, config: SGLangCaptureConfig, tmp_path: Path
) -> None:
    assert fill_from(capture, tmp_path / "whole").complete
    child = tmp_path / "child.py"
    places = [str(path) for path in (target, tmp_path / "broken", tmp_path / "log")]
    child.write_text(
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]\n"
        "from pathlib import Path\n"
        "from data_prep.config import SGLangCaptureConfig\n"
        "from test_sglang_capture import fill\n"
        f"target, store, log = map(Path, {places!r})\n"
        f"fill(target, {config!r}, store, log, pause=2.0)\n"
    )
    with subprocess.Popen([sys.executable, str(child)]) as process:
        while not list((tmp_path / "broken").glob("shard-*.json")):
            assert process.poll() is None, "the extraction ended before it could be killed"
            time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
    done = fill_from(capture, tmp_path / "broken")
    assert done.complete and done.found_done > 0 and done.records > 0
    whole, mended = Store.open(tmp_path / "whole"), Store.open(tmp_path / "broken")
    assert len(whole) == len(mended) == len(LENGTHS) * 4
    for i in range(len(whole)):
        assert whole[i].record_id == mended[i].record_id
        assert all(torch.equal(state, named(mended[i])[name]) for name, state in named(whole[i]).items())


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def serve(target: Path, cfg: SGLangCaptureConfig, port: int, log: Path, *flags: str) -> subprocess.Popen[bytes]:
    command = [cfg.python, "-m", "sglang.launch_server", f"--model-path={target}", f"--port={port}", *cfg.extra_args]
    whole = ["--disable-radix-cache", "--chunked-prefill-size=-1", "--dtype=float32", "--skip-server-warmup"]
    with open(log, "wb") as sink:
        return subprocess.Popen(
            [*command, *whole, *flags],
            env={**os.environ, **cfg.env},
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 600
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-2000:]
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(1)
    raise AssertionError(f"no server at {url}: {log.read_text()[-2000:]}")


@pytest.fixture
def servers(target: Path, config: SGLangCaptureConfig, tmp_path: Path) -> Iterator[SGLangCaptureConfig]:
    ids = [str(k - 1) for k in (2, 4, 5)]
    aux = ["--enable-return-aux-hidden-states", "--speculative-algorithm=EAGLE3"]
    aux += ["--return-aux-hidden-state-layer-ids", *ids]
    started = []
    try:
        for name, flags in (("aux", aux), ("teacher", ["--enable-return-hidden-states"])):
            port, log = free_port(), tmp_path / f"{name}.log"
            process = serve(target, config, port, log, *flags)
            started.append((f"http://127.0.0.1:{port}", process, log))
        for one in started:
            wait_for(*one)
        yield replace(config, url=started[0][0], teacher_url=started[1][0])
    finally:
        for _, process, _ in started:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_the_http_route_gives_the_same_states(servers: SGLangCaptureConfig, target: Path) -> None:
    plan = plan_servers(servers, LAYERS_ONLY)
    assert (plan.ids, plan.dtype) == ([1, 3, 4], "float32")
    norm = TargetWeights(target).final_norm()
    one = SGLangHTTPCapture(LAYERS_ONLY, plan, servers, vocab_size=VOCAB, final_norm=norm, out_dtype=torch.float32)
    found = by_site(one.run(records()))
    one.close()
    for name, state in reference(target, LAYERS_ONLY, "float32").items():
        assert ((found[name] - state).norm() / state.norm()).item() < 1e-4, name
    with pytest.raises(WiringError, match="captures other layers"):
        plan_servers(servers, replace(LAYERS_ONLY, aux=(Site(1), Site(4), Site(5))))


def test_a_plan_names_the_build(config: SGLangCaptureConfig) -> None:
    plan = plan_engine(config, WIRING, "auto", "float32")
    assert isinstance(plan, EnginePlan) and plan.identity["convention"] == "sglang-0.5.23"
    assert plan.identity["engine_version"].startswith("0.5.") and plan.dtype == "bfloat16"
