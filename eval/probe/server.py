"""Ask a running SGLang server which flags it resolved, and for the aux states of prompts.

Read from sglang 0.5.23 (srt/entrypoints/http_server.py, arg_groups/validation_hook.py, layers/logits_processor.py,
managers/scheduler_components/batch_result_processor.py) and 0.5.9: `/server_info` holds the resolved flags;
`/generate` with `return_hidden_states` returns, in `meta_info.hidden_states`, a list whose first entry holds one row
for each prompt token that was computed (tokens found in the prefix cache have none). The rows are the aux states
joined in slot order when an EAGLE-3 draft is loaded or when the server captures without one; else the last layer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import torch
from torch import Tensor

from eagle3.conventions import EngineConvention, sglang_convention
from eagle3.errors import DataError, RedraftError, WiringError
from eagle3.patient_http import NoAnswerError, PatientClient

WHOLE_PREFILL = "--disable-radix-cache --chunked-prefill-size -1"
_CAPTURE = "--speculative-algorithm EAGLE3 --enable-return-aux-hidden-states"


@dataclass(frozen=True)
class ServerFacts:
    """What a server says about itself; `info` is its whole answer."""

    url: str
    info: dict[str, Any]

    @property
    def version(self) -> str:
        """SGLang's version, "unknown" where it does not tell."""
        return str(self.info.get("version") or "unknown")

    @property
    def ranks(self) -> int:
        """Tensor-parallel ranks."""
        return self._whole("tp_size") or 1

    @property
    def captures(self) -> bool:
        """It captures aux states without a draft."""
        return bool(self.info.get("enable_return_aux_hidden_states"))

    @property
    def drafts(self) -> bool:
        """An EAGLE-3 draft is loaded."""
        return not self.captures and str(self.info.get("speculative_algorithm") or "").upper() == "EAGLE3"

    @property
    def returns_states(self) -> bool:
        """Requests may ask for the states of every token."""
        return (
            bool(self.info.get("enable_return_hidden_states")) or self.info.get("return_hidden_states_mode") == "full"
        )

    @property
    def capture_ids(self) -> list[int] | None:
        """The layer ids it was told to capture without a draft; None = its default."""
        ids = self.info.get("return_aux_hidden_state_layer_ids")
        if ids is not None and not (isinstance(ids, list) and all(type(one) is int for one in ids)):
            raise self._strange(f"return_aux_hidden_state_layer_ids is {ids!r}")
        return ids

    @property
    def prefix_cache(self) -> bool:
        """It may leave out tokens that an earlier prompt began with."""
        return not self.info.get("disable_radix_cache", False)

    @property
    def chunk(self) -> int | None:
        """Tokens a prefill chunk; None when prompts are never cut."""
        size = self._whole("chunked_prefill_size") or -1
        return size if size > 0 else None

    @property
    def without_graphs(self) -> bool:
        """No CUDA graphs are replayed."""
        return bool(self.info.get("disable_cuda_graph")) or self.info.get("device") == "cpu"

    def _whole(self, name: str) -> int | None:
        """A setting that is a whole number, or None where it is not set."""
        value = self.info.get(name)
        if value is not None and type(value) is not int:
            raise self._strange(f"{name} is {value!r}")
        return value

    def _strange(self, why: str) -> RedraftError:
        mend = "give the address of an SGLang server; 0.5.9 and 0.5.23 were read"
        return RedraftError("the server's settings are not as SGLang's", where=self.url, why=why, mend=mend)

    def convention(self) -> EngineConvention | None:
        """The id convention known for this version; None when there is none."""
        try:
            return sglang_convention(self.version)
        except WiringError:
            return None

    def refuse_without_aux(self, ids: Sequence[int] | None = None) -> None:
        """Refuse a server that does not hand out aux states, naming the flags to add.

        Args:
            ids: layer ids that the server should capture, where they are known.

        Raises:
            RedraftError: with the exact flags.
        """
        wanted = f" --return-aux-hidden-state-layer-ids {' '.join(map(str, ids))}" if ids else ""
        if self.drafts and not self.returns_states:
            raise RedraftError(
                "the server has a draft and does not return hidden states",
                where=self.url,
                why="neither --enable-return-hidden-states nor --return-hidden-states-mode full is on",
                mend=f"restart it with --enable-return-hidden-states {WHOLE_PREFILL} added",
            )
        if self.captures and str(self.info.get("aux_hidden_state_capture") or "eagle3").lower() != "eagle3":
            raise RedraftError(
                "the server captures for another kind of draft",
                where=self.url,
                why=f"capture method {self.info.get('aux_hidden_state_capture')!r}",
                mend=f"restart it with {_CAPTURE}{wanted} {WHOLE_PREFILL}",
            )
        if not self.captures and not self.drafts:
            negative = min(ids or [0]) < 0  # the capture flag takes none
            old = "enable_return_aux_hidden_states" not in self.info
            without = f"{_CAPTURE}{wanted} {WHOLE_PREFILL}"
            with_draft = f"its draft's flags and --enable-return-hidden-states {WHOLE_PREFILL}"
            raise RedraftError(
                "the server does not return aux hidden states",
                where=self.url,
                why=f"SGLang {self.version} runs with neither --enable-return-aux-hidden-states nor an EAGLE3 draft",
                mend=f"restart it with {with_draft if old or negative else without}",
                page="probe",
            )


@dataclass(frozen=True)
class Answer:
    """The states of one prompt as the server returned them.

    Args:
        rows: [n, W] float32, one a prompt token that was computed.
        cached_tokens: prompt tokens that it found in its prefix cache.
        output_ids: the tokens it generated.
        decoded: [m, W] float32, one a generated token that was fed back; the last one never is.
    """

    rows: Tensor
    cached_tokens: int
    output_ids: list[int]
    decoded: Tensor


class ProbeServer:
    """An SGLang server, over HTTP.

    Args:
        url: "http://127.0.0.1:30000".
        timeout: seconds an answer may take, until its last byte.
        client: another HTTP client (tests).
    """

    def __init__(self, url: str, timeout: float = 600.0, client: httpx.Client | None = None) -> None:
        self.url = url.rstrip("/")
        self._http = PatientClient(timeout, client=client)

    def facts(self) -> ServerFacts:
        """Read the server's flags.

        Raises:
            RedraftError: nobody answers, or it is no SGLang server.
        """
        info = None
        for path in ("/server_info", "/get_server_info"):  # the second is the older builds' name
            try:
                info = self._http.json("GET", self.url + path)
                break
            except NoAnswerError as err:
                if err.status != 404:
                    raise
        if isinstance(info, dict) and "disable_radix_cache" in info:
            return ServerFacts(self.url, info)
        raise RedraftError(
            "not an SGLang server",
            where=self.url,
            why="no /server_info with SGLang's flags",
            mend="give the address of an SGLang server; vLLM hands out no hidden states over HTTP",
        )

    def states(self, ids: Sequence[int], new_tokens: int = 1) -> Answer:
        """Aux states of one prompt, sent alone, and of `new_tokens - 1` tokens that it generates (end tokens ignored).

        Raises:
            RedraftError: the request failed, or the answer is not what this probe reads.
        """
        return self._read(self._generate([list(ids)], new_tokens, batch=False)[0])

    def batch_states(self, prompts: Sequence[Sequence[int]]) -> list[Answer]:
        """Aux states of several prompts sent in one request, in order.

        Raises:
            RedraftError: as `states`.
        """
        return [self._read(one) for one in self._generate([list(ids) for ids in prompts], 1, batch=True)]

    def _generate(self, prompts: list[list[int]], new_tokens: int, batch: bool) -> list[Any]:
        body = {
            "input_ids": prompts if batch else prompts[0],
            "sampling_params": {"max_new_tokens": new_tokens, "temperature": 0.0, "ignore_eos": True},
            "return_hidden_states": True,
        }
        answer = self._ask(body)
        answers = answer if isinstance(answer, list) else [answer]
        if len(answers) != len(prompts):
            raise self._strange(f"{len(answers)} answers to {len(prompts)} prompts")
        return answers

    def _read(self, answer: Any) -> Answer:
        meta = answer.get("meta_info") if isinstance(answer, dict) else None
        if not isinstance(meta, dict) or not isinstance(meta.get("hidden_states"), list):
            raise self._strange("the answer holds no meta_info.hidden_states")
        of_prompt: list[Any] = []
        of_output: list[Any] = []
        for part in meta["hidden_states"]:
            nested = isinstance(part, list) and bool(part) and isinstance(part[0], list)
            of_prompt += part if nested and not of_output else []
            of_output += [] if nested else [part]  # a bare row belongs to a generated token
        rows = self._table(of_prompt)
        if rows.ndim != 2:
            raise self._strange("it holds no row for any prompt token")
        decoded = self._table(of_output) if of_output else rows[:0]
        if decoded.ndim != 2:
            raise self._strange("the rows of its own tokens are no table")
        output, cached = answer.get("output_ids") or [], meta.get("cached_tokens") or 0
        if type(cached) is not int or not isinstance(output, list) or not all(type(one) is int for one in output):
            raise self._strange("output_ids or cached_tokens are no whole numbers")
        return Answer(rows, cached, output, decoded)

    def _table(self, rows: list[Any]) -> Tensor:
        try:
            return torch.tensor(rows, dtype=torch.float32)
        except (TypeError, ValueError, RuntimeError, OverflowError) as err:
            raise self._strange(f"its rows are no table of numbers: {err}") from None

    def _ask(self, body: dict[str, Any]) -> Any:
        try:
            return self._http.json("POST", self.url + "/generate", body)
        except NoAnswerError as err:
            mend = "see the server's log; with --max-tokens shorter prompts are asked for, with --timeout for longer"
            raise NoAnswerError(err.what, status=err.status, where=err.where, why=err.why, mend=mend) from None

    def _strange(self, why: str) -> RedraftError:
        return RedraftError(
            "the server's answer holds no aux states",
            where=self.url + "/generate",
            why=why,
            mend="check the server's version and flags; 0.5.9 and 0.5.23 were read",
        )


def check_rows(answer: Answer, tokens: int, facts: ServerFacts, hidden_size: int, where: str) -> Tensor:
    """The rows of a prompt, one a token, or the reason why there are fewer.

    Raises:
        DataError: rows are missing (the prefix cache or chunked prefill is named), of a wrong width or not finite.
    """
    found, width = answer.rows.shape
    why = ""
    if found != tokens:
        why = f"{found} rows came for {tokens} tokens; {_missing_rows(answer, tokens, facts)}"
    elif width % hidden_size:
        why = f"rows of width {width}, which is no multiple of the target's {hidden_size}"
    elif not bool(answer.rows.isfinite().all()):
        bad = int((~answer.rows.isfinite()).any(dim=1).sum())
        why = f"{bad} of {found} rows hold NaN or infinite values"
    if why:
        mend = f"restart the server with {WHOLE_PREFILL}" if found != tokens else "see the server's log and its target"
        raise DataError("the server's aux states are not usable", where=where, why=why, mend=mend, page="probe")
    return answer.rows


def _missing_rows(answer: Answer, tokens: int, facts: ServerFacts) -> str:
    if answer.cached_tokens:
        return f"the prefix cache held {answer.cached_tokens} of them (--disable-radix-cache is off)"
    if facts.chunk is not None and facts.chunk < tokens:
        return f"the prompt was prefilled in chunks of {facts.chunk} (--chunked-prefill-size)"
    if facts.prefix_cache:
        return "the prefix cache is on and may have held the rest (--disable-radix-cache is off)"
    return "the server left some out"
