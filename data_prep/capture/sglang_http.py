"""Capture over HTTP from running SGLang servers: the small-scale fallback, for states travel as text.

A server started with `--enable-return-aux-hidden-states` returns what it would feed a draft, and returns it *in place
of* its last-layer states; so the teacher comes from a second server of the same target, and only after the final norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import torch

from data_prep.capture.sample import CapturedSample
from data_prep.capture.sglang_engine import render_ids
from data_prep.capture.sglang_samples import RESTART, Asked, sample
from data_prep.config import SGLangCaptureConfig
from eagle3.conventions import EngineConvention, convention, sglang_convention
from eagle3.errors import RedraftError, WiringError
from eagle3.patient_http import NoAnswerError, PatientClient
from eagle3.wiring import Wiring

WHOLE = {"disable_radix_cache": True, "chunked_prefill_size": -1, "pp_size": 1, "enable_mixed_chunk": False}
WHOLE_FLAGS = "--disable-radix-cache --chunked-prefill-size -1"
NORM_TOLERANCE = 0.05
INFO_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class HTTPPlan:
    """What the servers say of themselves, after it was checked."""

    version: str
    rule: EngineConvention
    ids: list[int]
    dtype: str

    @property
    def identity(self) -> dict[str, Any]:
        """How the states are computed; a store is continued only with the same."""
        return {
            "backend": "sglang_http",
            "engine_version": self.version,
            "convention": self.rule.name,
            "ids": self.ids,
            "compute_dtype": self.dtype,
        }


def plan_servers(cfg: SGLangCaptureConfig, wiring: Wiring, client: httpx.Client | None = None) -> HTTPPlan:
    """Ask both servers how they run, and refuse what would cut states or feed other ones.

    Raises:
        WiringError: the teacher is not to be had over HTTP, or the servers capture other layers.
        RedraftError: a server is not there, or runs with settings that cut states; the line has the flags to set.
    """
    if wiring.teacher != "final_normed":
        raise WiringError(
            "SGLang returns the last state only after the final norm over HTTP",
            where="capture.backend=sglang_http",
            why=f"wiring.teacher is {wiring.teacher}",
            mend="set wiring.teacher=final_normed, or capture in process with capture.backend=sglang",
            page="capture",
        )
    http = PatientClient(INFO_TIMEOUT_S, client=client)
    try:
        aux, last = (_server_info(http, url) for url in (cfg.url, cfg.teacher_url))
    finally:
        http.close()
    version = str(aux.get("version", ""))
    rule = sglang_convention(version) if cfg.convention == "auto" else convention(cfg.convention)
    ids = render_ids(rule, wiring)
    _check_aux_server(cfg.url, aux, rule, ids, wiring)
    _check_teacher_server(cfg.teacher_url, last)
    same = [name for name in ("version", "model_path", "dtype", "quantization") if aux.get(name) != last.get(name)]
    if same:
        raise RedraftError(
            "the two servers run different targets",
            where=f"{cfg.url} and {cfg.teacher_url}",
            why="; ".join(f"{name} is {aux.get(name)!r} and {last.get(name)!r}" for name in same),
            mend="start both with the same SGLang, --model-path and --dtype",
        )
    return HTTPPlan(version, rule, ids, str(aux.get("dtype", "auto")))


def _server_info(http: PatientClient, url: str) -> dict[str, Any]:
    try:
        found = http.json("GET", f"{url.rstrip('/')}/server_info")
    except NoAnswerError as err:
        raise RedraftError(
            "cannot ask a server how it runs",
            where=f"{url}/server_info",
            why=f"{err.what}: {err.why}",
            mend="start SGLang 0.5.23 or newer there, and wait until it is ready",
        ) from None
    if not isinstance(found, dict):
        why, mend = "/server_info is no JSON object", "give the address of an SGLang server"
        raise RedraftError("not an SGLang server", where=url, why=why, mend=mend)
    return found


def _check_whole(url: str, info: dict[str, Any]) -> None:
    """Refuse settings that give fewer states than tokens."""
    wrong = [f"{name}={info.get(name)!r}" for name, want in WHOLE.items() if info.get(name, want) not in (want, None)]
    if info.get("speculative_algorithm"):
        wrong.append(f"speculative_algorithm={info['speculative_algorithm']!r}")
    if wrong:
        raise RedraftError(
            "this server would return fewer states than tokens",
            where=url,
            why=", ".join(wrong),
            mend=f"start it with {WHOLE_FLAGS}, one pipeline stage and no draft",
        )


def _check_aux_server(url: str, info: dict[str, Any], rule: EngineConvention, ids: list[int], wiring: Wiring) -> None:
    if min(ids) < 0:
        raise WiringError(
            "this server's flag takes no negative ids",
            where=f"{rule.name}: {ids}",
            why="--return-aux-hidden-state-layer-ids refuses them",
            mend="capture in process with capture.backend=sglang",
        )
    flags = (
        "--enable-return-aux-hidden-states --speculative-algorithm EAGLE3 "
        f"--return-aux-hidden-state-layer-ids {' '.join(map(str, ids))} {WHOLE_FLAGS}"
    )
    found = info.get("return_aux_hidden_state_layer_ids")
    if not info.get("enable_return_aux_hidden_states") or info.get("aux_hidden_state_capture", "eagle3") != "eagle3":
        raise RedraftError("this server returns no aux hidden states", where=url, mend=f"start it with {flags}")
    if not (found == ids or (found is None and rule.render_default_ok(wiring))):
        raise WiringError(
            "this server captures other layers than the wiring names",
            where=url,
            why=f"return_aux_hidden_state_layer_ids is {found}; {', '.join(wiring.names)} are {ids} by {rule.name}",
            mend=f"start it with {flags}",
        )
    _check_whole(url, info)


def _check_teacher_server(url: str, info: dict[str, Any]) -> None:
    full = info.get("return_hidden_states_mode", "full" if info.get("enable_return_hidden_states") else None)
    if full != "full" or info.get("enable_return_aux_hidden_states"):
        raise RedraftError(
            "this server does not return last-layer states",
            where=url,
            why="it returns aux states in their place" if info.get("enable_return_aux_hidden_states") else "",
            mend=f"start a second server of the target with --enable-return-hidden-states {WHOLE_FLAGS}",
        )
    _check_whole(url, info)


class SGLangHTTPCapture:
    """Asks two servers for each record, one request at a time.

    Args:
        wiring: which sites to keep; its teacher is `final_normed`.
        plan: what `plan_servers` found.
        cfg: addresses and timeout.
        vocab_size: the target's.
        final_norm: [H], the target's norm weight: the teacher's rows divided by it must have a mean square of 1.
        out_dtype: dtype of the states handed over.
        client: for tests.
    """

    def __init__(
        self,
        wiring: Wiring,
        plan: HTTPPlan,
        cfg: SGLangCaptureConfig,
        *,
        vocab_size: int,
        final_norm: torch.Tensor | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
        client: httpx.Client | None = None,
    ) -> None:
        self.wiring, self.plan, self.cfg = wiring, plan, cfg
        self.vocab_size, self.final_norm, self.out_dtype = vocab_size, final_norm, out_dtype
        self.info: dict[str, Any] = dict(plan.identity)
        self._http = PatientClient(cfg.timeout_s, client=client)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def run(self, batch: Sequence[tuple[str, Any, Any]]) -> list[CapturedSample]:
        """Capture a batch of records (`record_id`, `input_ids` [T], `loss_mask` [T]), in the given order.

        Raises:
            DataError: a record that this target cannot read.
            WiringError: the teacher is not a normed state.
            RedraftError: a server failed, or returned other states than asked for.
        """
        return [self._capture(Asked.check(record, self.vocab_size)) for record in batch]

    def _capture(self, one: Asked) -> CapturedSample:
        aux = self._states(self.cfg.url, one, self.wiring.feature_width)
        teacher = self._states(self.cfg.teacher_url, one, self.wiring.hidden_size)
        self._check_normed(teacher)
        return sample(one, aux, teacher, self.wiring, self.out_dtype, self.plan.dtype)

    def _states(self, url: str, one: Asked, width: int) -> torch.Tensor:
        """[T, width] float32."""
        body = {
            "rid": one.record_id,
            "input_ids": one.input_ids.tolist(),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_hidden_states": True,
        }
        try:
            meta = self._http.json("POST", f"{url.rstrip('/')}/generate", body)["meta_info"]
            rows = meta["hidden_states"][0]
        except NoAnswerError as err:
            raise self._failed(url, one, f"{err.what}: {err.why}") from None
        except (TypeError, KeyError, IndexError) as err:
            raise self._failed(url, one, f"the answer holds no meta_info.hidden_states ({err})") from None
        try:
            states = torch.tensor(rows, dtype=torch.float32)
        except (TypeError, ValueError, RuntimeError, OverflowError) as err:  # JSON has no NaN: the server writes null
            raise self._failed(url, one, f"a state is not a number ({err}), as when it is not finite") from None
        if states.ndim != 2:
            raise self._failed(url, one, f"the states are no table, but of shape {list(states.shape)}")
        self._check_answer(url, one, meta, states, width)
        return states

    def _failed(self, url: str, one: Asked, why: str) -> RedraftError:
        return RedraftError(
            "a server gave no hidden states",
            where=f"{url}, record {one.record_id}",
            why=why,
            mend="read the server's log; run the stage again to go on where it stopped",
        )

    def _check_answer(self, url: str, one: Asked, meta: dict[str, Any], states: torch.Tensor, width: int) -> None:
        where = f"{url}, record {one.record_id}"
        if str(meta.get("id", one.record_id)) != one.record_id:
            why = f"it is for {meta['id']}"
            raise RedraftError("the server answered another request", where=where, why=why, mend=RESTART)
        if states.shape[0] != one.tokens or meta.get("cached_tokens"):
            raise RedraftError(
                "the server returned another number of states than tokens",
                where=where,
                why=f"{states.shape[0]} rows for {one.tokens} tokens, {meta.get('cached_tokens', 0)} of them cached",
                mend=f"start it with {WHOLE_FLAGS}",
            )
        if states.shape[1] != width:
            raise WiringError(
                "the server returned another width than the wiring's",
                where=where,
                why=f"{states.shape[1]} columns, expected {width}",
                mend="check which layers it captures",
            )

    def _check_normed(self, teacher: torch.Tensor) -> None:
        """A normed row, divided by the norm's weight, has a mean square of 1 (of RMS norms, which SGLang's are)."""
        if self.final_norm is None:
            return
        weight = self.final_norm.float()
        used = weight.abs() > 1e-3 * weight.abs().max()
        square = (teacher[:, used] / weight[used]).square().mean(dim=1).median().item()
        if abs(square - 1.0) > NORM_TOLERANCE:
            raise WiringError(
                "the teacher's states are not those after the final norm",
                where=self.cfg.teacher_url,
                why=f"divided by the norm's weight their mean square is {square:.3g}, expected 1",
                mend="capture in process with capture.backend=sglang",
            )
