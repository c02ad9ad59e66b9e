"""The HTTP route against servers that answer as SGLang 0.5.23 does, and as it does when set up wrongly."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import torch

from data_prep.capture.sglang_http import HTTPPlan, SGLangHTTPCapture, plan_servers
from data_prep.config import SGLangCaptureConfig
from eagle3.errors import DataError, RedraftError, WiringError
from eagle3.wiring import Site, Wiring

H = 8
CFG = SGLangCaptureConfig(url="http://aux:1", teacher_url="http://last:2")
WIRING = Wiring((Site(2), Site(3), Site(5)), "final_normed", "llama", 7, H)
NORM = torch.linspace(0.5, 1.5, H)
RECORDS = [("a", [5, 9, 3, 17], [0, 1, 1, 1]), ("b", [7, 8], [1, 1])]


def rows(tokens: list[int], width: int, shift: float = 0.0) -> torch.Tensor:
    t = torch.tensor(tokens, dtype=torch.float32)[:, None]
    return torch.sin(0.37 * t + 1.3 * torch.arange(width)[None] + shift).bfloat16().float()


def normed(tokens: list[int]) -> torch.Tensor:
    state = rows(tokens, H, 2.0)
    return state / state.square().mean(dim=1, keepdim=True).sqrt() * NORM


class Servers:
    """Two SGLang servers by host name; `aux` and `last` are changed by tests."""

    def __init__(self) -> None:
        common = {
            "version": "0.5.23",
            "model_path": "/t",
            "dtype": "bfloat16",
            "quantization": None,
            "disable_radix_cache": True,
            "chunked_prefill_size": -1,
            "pp_size": 1,
            "speculative_algorithm": None,
        }
        self.info: dict[str, dict[str, Any]] = {
            "aux": {
                **common,
                "enable_return_aux_hidden_states": True,
                "aux_hidden_state_capture": "eagle3",
                "return_aux_hidden_state_layer_ids": [1, 2, 4],
                "return_hidden_states_mode": "full",
            },
            "last": {**common, "enable_return_aux_hidden_states": False, "return_hidden_states_mode": "full"},
        }
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.change: Any = lambda _host, meta: meta

    def __call__(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        if request.url.path == "/server_info":
            return httpx.Response(200, json=self.info[host])
        body = json.loads(request.content)
        self.asked.append((host, body))
        states = rows(body["input_ids"], 3 * H) if host == "aux" else normed(body["input_ids"])
        meta = {"id": body["rid"], "cached_tokens": 0, "hidden_states": [states.tolist()]}
        return httpx.Response(200, json={"text": "x", "meta_info": self.change(host, meta)})

    def client(self) -> httpx.Client:
        return httpx.Client(transport=httpx.MockTransport(self))


@pytest.fixture
def servers() -> Servers:
    return Servers()


def plan(servers: Servers, wiring: Wiring = WIRING, cfg: SGLangCaptureConfig = CFG) -> HTTPPlan:
    return plan_servers(cfg, wiring, servers.client())


def capture(servers: Servers) -> SGLangHTTPCapture:
    return SGLangHTTPCapture(
        WIRING, plan(servers), CFG, vocab_size=64, final_norm=NORM, out_dtype=torch.float32, client=servers.client()
    )


def test_states_of_two_servers_make_one_sample(servers: Servers) -> None:
    samples = capture(servers).run(RECORDS)
    for (record_id, tokens, mask), one in zip(RECORDS, samples, strict=True):
        assert (one.record_id, one.input_ids.tolist(), one.teacher) == (record_id, tokens, "final_normed")
        assert one.loss_mask.tolist() == [bool(m) for m in mask]
        aux = rows(tokens, 3 * H).split(H, dim=1)
        for name, want in zip(["layer_2", "layer_3", "layer_5"], aux, strict=True):
            assert torch.equal(one.sites[name], want)
        torch.testing.assert_close(one.final, normed(tokens))
    bodies = [body for _, body in servers.asked]
    assert [host for host, _ in servers.asked] == ["aux", "last", "aux", "last"]
    assert all(body["return_hidden_states"] is True and body["rid"] for body in bodies)


def test_the_identity_of_the_store(servers: Servers) -> None:
    assert plan(servers).identity == {
        "backend": "sglang_http",
        "engine_version": "0.5.23",
        "convention": "sglang-0.5.23",
        "ids": [1, 2, 4],
        "compute_dtype": "bfloat16",
    }


def test_the_un_normed_teacher_is_refused_with_both_ways_out(servers: Servers) -> None:
    wiring = Wiring(WIRING.aux, "final", "llama", 7, H)
    with pytest.raises(WiringError) as error:
        plan(servers, wiring)
    assert "wiring.teacher=final_normed" in str(error.value) and "capture.backend=sglang" in str(error.value)


def test_the_default_layers_need_no_ids_on_the_server(servers: Servers) -> None:
    servers.info["aux"]["return_aux_hidden_state_layer_ids"] = None
    native = Wiring.native("llama", 8, H, teacher="final_normed")
    assert plan(servers, native).ids == [1, 3, 4]
    with pytest.raises(WiringError, match="captures other layers"):
        plan(servers, Wiring((Site(1), Site(3), Site(5)), "final_normed", "llama", 8, H))


@pytest.mark.parametrize(
    ("host", "change", "words"),
    [
        ("aux", {"disable_radix_cache": False}, "fewer states.*disable_radix_cache=False.*--disable-radix-cache"),
        ("last", {"chunked_prefill_size": 8192}, "fewer states.*chunked_prefill_size=8192.*-1"),
        ("aux", {"pp_size": 2}, "fewer states.*pp_size=2"),
        ("last", {"speculative_algorithm": "EAGLE3"}, "fewer states.*speculative_algorithm"),
        ("aux", {"enable_return_aux_hidden_states": False}, "no aux.*--return-aux-hidden-state-layer-ids 1 2 4"),
        ("aux", {"return_aux_hidden_state_layer_ids": [2, 3, 5]}, r"other layers.*\[2, 3, 5\].*are \[1, 2, 4\]"),
        ("last", {"return_hidden_states_mode": None}, "does not return last-layer.*--enable-return-hidden-states"),
        ("last", {"enable_return_aux_hidden_states": True}, "aux states in their place"),
        ("last", {"model_path": "/other"}, "different targets.*model_path is '/t' and '/other'"),
    ],
)
def test_a_server_set_up_wrongly_is_refused_with_the_flags(
    servers: Servers, host: str, change: dict[str, Any], words: str
) -> None:
    servers.info[host].update(change)
    with pytest.raises(RedraftError, match=words):
        plan(servers)


def test_the_embedding_in_slot_0_cannot_be_asked_for(servers: Servers) -> None:
    with pytest.raises(WiringError, match=r"no negative ids.*capture.backend=sglang"):
        plan(servers, Wiring((Site(0), Site(2)), "final_normed", "llama", 7, H))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda _h, m: {**m, "hidden_states": [m["hidden_states"][0][1:]]}, "3 rows for 4 tokens"),
        (lambda _h, m: {**m, "cached_tokens": 2}, "2 of them cached.*--disable-radix-cache"),
        (lambda _h, m: {**m, "id": "other"}, "answered another request.*record a.*other"),
        (lambda _h, m: {k: v for k, v in m.items() if k != "hidden_states"}, "no hidden states.*record a"),
        (lambda _h, m: {**m, "hidden_states": [[r[:-1] for r in m["hidden_states"][0]]]}, "23 columns, expected 24"),
        (
            lambda h, m: (
                {**m, "hidden_states": [[[3 * x for x in r] for r in m["hidden_states"][0]]]} if h == "last" else m
            ),
            "not those after the final norm.*mean square is 9",
        ),
        (
            lambda h, m: (
                {**m, "hidden_states": [[[None] * len(r) for r in m["hidden_states"][0]]]} if h == "aux" else m
            ),
            "no hidden states.*record a.*not finite",
        ),
    ],
)
def test_a_wrong_answer_is_refused(servers: Servers, change: Any, words: str) -> None:
    one = capture(servers)
    servers.change = change
    with pytest.raises(RedraftError, match=words):
        one.run(RECORDS)


def test_a_server_that_is_away(servers: Servers) -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("connection refused", request=request)

    with pytest.raises(RedraftError, match=r"cannot ask a server how it runs.*http://aux:1/server_info.*refused"):
        plan_servers(CFG, WIRING, httpx.Client(transport=httpx.MockTransport(refuse)))
    client = httpx.Client(transport=httpx.MockTransport(lambda _r: httpx.Response(400, text="not configured")))
    one = SGLangHTTPCapture(WIRING, plan(servers), CFG, vocab_size=64, client=client)
    with pytest.raises(RedraftError, match="status 400: not configured"):
        one.run(RECORDS)
    with pytest.raises(DataError, match="record bad"):
        one.run([("bad", [64], [1])])
