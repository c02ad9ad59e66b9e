"""The live probe over a stand-in server: every planted fault is named, and a faultless server agrees."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from probe_fakes import FakeServer, feed_sites, partial_sum
from torch import Tensor, nn

from eagle3.wiring import Wiring
from eval.probe.__main__ import main

Probe = Callable[..., tuple[int, dict[str, Any]]]
Serve = Callable[..., FakeServer]
URL = "http://fake:30000"


@pytest.fixture
def live(probe: Probe, target: Path) -> Probe:
    return lambda *more: probe("live", "--url", URL, "--target", target, "--prompts", 3, "--max-tokens", 24, *more)


def said(verdict: dict[str, Any]) -> str:
    return " ".join([verdict["what"], *verdict["reasons"], verdict["mend"]])


def test_faultless_server_agrees_and_every_slot_is_named(serve: Serve, live: Probe) -> None:
    serve()
    code, verdict = live("--wiring", "native")
    assert (code, verdict["verdict"]) == (0, "agrees")
    assert verdict["facts"]["measured"] == ["layer_2", "layer_4", "layer_5"]
    for row in verdict["rows"]:
        assert row["holds"] == row["expected"] and row["sure"] == "yes"
        assert row["cosine"] > 0.9999 and row["its error"] > 3 * row["error"] > 0


def test_prompts_are_sent_alone_first_then_together(serve: Serve, live: Probe) -> None:
    server = serve()
    assert live()[0] == 0
    assert [isinstance(ids[0], list) for ids in server.asked] == [False, False, False, True]
    assert server.asked[3] == server.asked[:3]
    assert len({tuple(ids) for ids in server.asked[:3]}) == 3


@pytest.mark.parametrize(
    ("fed", "words"),
    [
        (("embedding", "layer_2", "layer_4"), "shifted by one slot"),
        (("embedding", "layer_2", "layer_4"), "the embedding is new to the draft"),
        (("layer_3", "layer_5", "layer_6"), "one layer later"),
        (("layer_1", "layer_3", "layer_4"), "one layer earlier"),
        (("layer_5", "layer_4", "layer_2"), "in another order"),
        (("layer_4", "layer_5", "layer_6"), "slot 0 was trained on layer 2; the server feeds layer 4"),
        (("layer_2", "layer_4", "final"), "slot 2 was trained on layer 5; the server feeds final"),
        (("layer_2", "layer_4", "final_normed"), "feeds final_normed"),
        (("layer_2", "layer_2", "layer_5"), "layer_2 is fed in more than one slot"),
        (("layer_2", "layer_4"), "the server feeds 2"),
    ],
)
def test_wrong_feeds_are_named(serve: Serve, live: Probe, fed: tuple[str, ...], words: str) -> None:
    serve(feed=feed_sites(*fed))
    code, verdict = live("--wiring", "layer_2,layer_4,layer_5")
    assert (code, verdict["verdict"]) == (1, "disagrees")
    assert verdict["facts"]["measured"] == list(fed)
    assert words in said(verdict) and verdict["mend"]


def test_without_an_expectation_the_convention_is_held_against_the_server(serve: Serve, live: Probe) -> None:
    serve(info={"return_aux_hidden_state_layer_ids": [1, 3, 4]})  # llama: +1, as it feeds
    assert live()[0] == 0
    serve(info={"return_aux_hidden_state_layer_ids": [2, 4, 5]})  # promises 3, 5, 6; feeds 2, 4, 5
    code, verdict = live()
    assert code == 1 and "does not follow the rule known for its version" in said(verdict)
    assert "wiring.aux=[layer_2,layer_4,layer_5]" in verdict["mend"]


def test_mend_gives_ids_for_the_servers_own_convention(serve: Serve, live: Probe) -> None:
    serve(info={"return_aux_hidden_state_layer_ids": [1, 3, 4]})
    code, verdict = live("--wiring", "layer_3,layer_4,layer_6")
    assert code == 1 and "= [2, 3, 5]" in verdict["mend"] and "sglang-0.5.23" in verdict["mend"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_partial_sums_are_named(serve: Serve, live: Probe, model: nn.Module, ranks: int) -> None:
    part = partial_sum(model, 4, ranks)

    def feed(states: dict[str, Tensor], ids: list[int]) -> Tensor:
        return torch.cat([states["layer_2"], part(ids), states["layer_5"]], dim=-1)

    serve(feed=feed, info={"tp_size": ranks})
    code, verdict = live("--wiring", "native")
    assert code == 1 and verdict["what"] == "the server feeds partial sums"
    assert f"one of {ranks} ranks" in said(verdict) and "all-reduce" in verdict["mend"]
    assert [row["sure"] for row in verdict["rows"]] == ["yes", "no", "yes"]
    serve(feed=feed)  # one rank has nothing to sum: the same states then have no known cause
    assert live("--wiring", "native")[0] == 2


def test_scaled_slot_is_named(serve: Serve, live: Probe) -> None:
    def feed(states: dict[str, Tensor], _ids: list[int]) -> Tensor:
        return torch.cat([states["layer_2"], states["layer_4"] / 2, states["layer_5"]], dim=-1)

    serve(feed=feed, info={"tp_size": 2})
    code, verdict = live("--wiring", "native")
    assert code == 1 and "layer_4 times 1/2: a partial sum of 2 ranks" in said(verdict)


def test_noise_cannot_be_told(serve: Serve, live: Probe) -> None:
    noise = torch.randn(
        320, 192, generator=torch.Generator().manual_seed(0)
    )  # a row for each token: the same each time
    serve(feed=lambda _states, ids: noise[ids])
    code, verdict = live("--wiring", "native")
    assert code == 2 and "match no site" in verdict["what"] and "very weights" in verdict["mend"]


def test_rows_kept_by_the_prefix_cache_are_noticed(serve: Serve, live: Probe) -> None:
    def cut(answer: dict[str, Any]) -> None:
        answer["meta_info"]["hidden_states"][0] = answer["meta_info"]["hidden_states"][0][5:]
        answer["meta_info"]["cached_tokens"] = 5

    serve(edit=cut, info={"disable_radix_cache": False})
    code, verdict = live()
    assert code == 2 and "prefix cache held 5" in said(verdict) and "--disable-radix-cache" in verdict["mend"]


def test_chunked_prefill_is_noticed(serve: Serve, live: Probe) -> None:
    def cut(answer: dict[str, Any]) -> None:
        answer["meta_info"]["hidden_states"][0] = answer["meta_info"]["hidden_states"][0][-8:]

    serve(edit=cut, info={"chunked_prefill_size": 16})
    code, verdict = live()
    assert code == 2 and "chunks of 16" in said(verdict) and "--chunked-prefill-size -1" in verdict["mend"]


def test_generated_tokens_fed_otherwise_are_noticed(serve: Serve, live: Probe) -> None:
    with_draft = {"enable_return_aux_hidden_states": False, "speculative_algorithm": "EAGLE3", "version": "0.5.9"}
    served = feed_sites("layer_3", "layer_5", "layer_6")  # graphs captured with the default sites, prompts run without
    serve(feed=served, decode=feed_sites("layer_2", "layer_4", "layer_5"), info=with_draft)
    code, verdict = live("--wiring", "layer_3,layer_5,layer_6")
    assert code == 1 and "slot 0 holds layer_3 on prompts and layer_2 on generated tokens" in said(verdict)
    assert "--disable-cuda-graph" in verdict["mend"]
    serve(feed=served, info=with_draft)
    code, verdict = live("--wiring", "layer_3,layer_5,layer_6")
    assert code == 0 and "prompts and 21 generated tokens are fed alike" in said(verdict)


def test_missing_states_of_generated_tokens_are_said(serve: Serve, live: Probe) -> None:
    def fewer(answer: dict[str, Any]) -> None:
        answer["meta_info"]["hidden_states"] = answer["meta_info"]["hidden_states"][:3]

    old = {"enable_return_aux_hidden_states": False, "speculative_algorithm": "EAGLE3", "version": "0.5.9"}
    three = {"feed": feed_sites("layer_3", "layer_5", "layer_6"), "edit": fewer}
    serve(**three, info=old)  # its graphs may feed the default to generated tokens, which cannot be seen
    code, verdict = live("--wiring", "layer_3,layer_5,layer_6")
    assert code == 2 and "while it generates could not be seen" in verdict["what"]
    for harmless in ({"disable_cuda_graph": True}, {"device": "cpu"}, {"version": "0.5.23"}):
        serve(**three, info=old | harmless)
        assert live("--wiring", "layer_3,layer_5,layer_6")[0] == 0
    serve(edit=fewer)
    code, verdict = live("--wiring", "native")
    assert code == 0 and "only prompts were compared" in said(verdict)


def test_mixed_up_batches_are_named(serve: Serve, live: Probe) -> None:
    def swap(answers: list[Any]) -> list[Any]:
        return [answers[1], answers[0], answers[2]]

    serve(batch_edit=swap)
    code, verdict = live("--wiring", "native")
    assert code == 1 and "mixes up requests" in said(verdict)


def _nan(answer: dict[str, Any]) -> None:
    answer["meta_info"]["hidden_states"][0][3][7] = None


def _ragged(answer: dict[str, Any]) -> None:
    answer["meta_info"]["hidden_states"][0][3].pop()


def _absent(answer: dict[str, Any]) -> None:
    del answer["meta_info"]["hidden_states"]


@pytest.mark.parametrize("edit", [_nan, _ragged, _absent])
def test_unusable_answers_give_one_line(serve: Serve, live: Probe, edit: Callable[[dict[str, Any]], None]) -> None:
    serve(edit=edit)
    code, verdict = live()
    assert code == 2 and verdict["what"] == "the server's answer holds no aux states"


def test_not_a_number_is_refused(serve: Serve, live: Probe) -> None:
    text = json.dumps({"meta_info": {"hidden_states": [[[float("nan")] * 192] * 24]}})  # NaN, as Python writes it
    serve(raw=httpx.Response(200, text=text))
    code, verdict = live()
    assert code == 2 and "24 of 24 rows hold NaN" in said(verdict)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (httpx.Response(500, text="Internal Server Error"), "Internal Server Error (5 tries)"),
        (httpx.Response(200, text='{"meta_info": {"hidden_states": [[[0.1, 0.'), "not whole JSON"),
        (httpx.Response(400, json={"error": {"message": "not configured to return hidden states"}}), "not configured"),
    ],
)
def test_failed_requests_give_one_line(serve: Serve, live: Probe, raw: httpx.Response, words: str) -> None:
    serve(raw=raw)
    code, verdict = live()
    assert code == 2 and words in said(verdict)


def test_nobody_answering_and_other_programs_are_told_apart(
    serve: Serve, live: Probe, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["live", "--url", "http://nobody:1", "--target", str(target)]) == 2  # `serve` routes all requests
    assert "the server does not answer [http://nobody:1/server_info]" in capsys.readouterr().err
    server = serve()
    server.info = {"object": "list"}
    code, verdict = live()
    assert code == 2 and verdict["what"] == "not an SGLang server"


@pytest.mark.parametrize(
    ("info", "flags"),
    [
        ({}, "--speculative-algorithm EAGLE3 --enable-return-aux-hidden-states --disable-radix-cache"),
        ({"speculative_algorithm": "EAGLE3", "return_hidden_states_mode": None}, "--enable-return-hidden-states"),
        ({"speculative_algorithm": "EAGLE3", "return_hidden_states_mode": "last"}, "--enable-return-hidden-states"),
    ],
)
def test_missing_flags_are_named_exactly(serve: Serve, live: Probe, info: dict[str, Any], flags: str) -> None:
    server = serve(info={"enable_return_aux_hidden_states": False, "aux_hidden_state_capture": None, **info})
    code, verdict = live()
    assert code == 2 and flags in verdict["mend"] and "--chunked-prefill-size -1" in verdict["mend"]
    assert not server.asked  # nothing was sent before the flags were read


def test_old_build_without_the_capture_flag_is_told_to_serve_its_draft(serve: Serve, live: Probe) -> None:
    server = serve(info={"version": "0.5.9"})
    del server.info["enable_return_aux_hidden_states"]
    code, verdict = live()
    assert code == 2 and "its draft's flags and --enable-return-hidden-states" in verdict["mend"]


def test_served_draft_is_the_expectation(
    serve: Serve, live: Probe, fitted: Callable[..., Path], wire: Callable[..., Wiring]
) -> None:
    folder = fitted(wire(2, 4, 6))  # ids [1, 3, 5]
    with_draft = {"enable_return_aux_hidden_states": False, "speculative_algorithm": "EAGLE3"}
    serve(feed=feed_sites("layer_2", "layer_4", "layer_6"), info=with_draft)
    code, verdict = live("--draft", folder)
    assert code == 0 and verdict["facts"]["mode"] == "with its draft"
    serve(feed=feed_sites("embedding", "layer_2", "layer_4"), info=with_draft)  # a patched build
    code, verdict = live("--draft", folder)
    assert code == 1
    assert "shifted by one slot" in said(verdict) and "does not follow the rule known" in said(verdict)


def test_draft_of_another_target_is_refused(
    serve: Serve, live: Probe, fitted: Callable[..., Path], wire: Callable[..., Wiring]
) -> None:
    deeper = Wiring(wire(2, 4, 6).aux, "final", "llama", 9, 64)
    serve()
    code, verdict = live("--draft", fitted(wire(2, 4, 6), claimed=deeper))
    assert code == 2 and "9 layers of width 64; --target has 8 of 64" in said(verdict)


def test_server_that_captures_other_ids_than_the_drafts_is_not_judged(
    serve: Serve, live: Probe, fitted: Callable[..., Path], wire: Callable[..., Wiring]
) -> None:
    folder = fitted(wire(2, 4, 6))
    serve()
    code, verdict = live("--draft", folder)
    assert code == 2 and "--return-aux-hidden-state-layer-ids 1 3 5" in verdict["mend"]


def test_folder_of_another_tool_is_read_by_the_servers_convention(
    serve: Serve, live: Probe, fitted: Callable[..., Path], wire: Callable[..., Wiring]
) -> None:
    folder = fitted(wire(2, 4, 6), other_tool_ids=[1, 3, 5])
    serve(feed=feed_sites("layer_2", "layer_4", "layer_6"), info={"return_aux_hidden_state_layer_ids": [1, 3, 5]})
    code, verdict = live("--draft", folder)
    assert code == 0 and "it names no wiring" in said(verdict)


def test_stored_states_take_the_targets_place(
    serve: Serve, live: Probe, store: Callable[..., Path], wire: Callable[..., Wiring], monkeypatch: pytest.MonkeyPatch
) -> None:
    import eval.probe.commands as commands

    folder = store(wire(2, 4, 5))
    serve()
    monkeypatch.setattr(commands, "load_target", lambda *_a, **_k: pytest.fail("the target must not be loaded"))
    assert live("--store", folder, "--wiring", "native")[0] == 0
    serve(feed=feed_sites("embedding", "layer_2", "layer_4"))
    code, verdict = live("--store", folder, "--wiring", "native")
    assert code == 1 and "shifted by one slot" in said(verdict)


def test_random_tokens_need_no_tokenizer(serve: Serve, live: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    import eval.probe.prompts as prompts

    monkeypatch.setattr(prompts, "load_tokenizer", lambda *_a: pytest.fail("no tokenizer is needed"))
    serve()
    assert live("--random-tokens", "--wiring", "native")[0] == 0


def test_verdict_for_people_has_table_reason_and_mend(
    serve: Serve, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(feed=feed_sites("layer_3", "layer_5", "layer_6"))
    assert main(["live", "--url", URL, "--target", str(target), "--wiring", "native", "--prompts", "2"]) == 1
    text = capsys.readouterr().out
    assert "DISAGREES: the server feeds layer_3, layer_5, layer_6" in text
    assert "runner-up" in text and "one layer later" in text and "To mend:" in text
