"""What a running server says of itself: engine, version, model, parsers, and how its prompts leave the reasoning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from data_prep.regenerate.client import ChatClient, FailedError, UnusableError
from data_prep.regenerate.thinking import Prefill, prefill_of
from eagle3.errors import ConfigError, RedraftError

START_PATIENCE_S = 15.0  # a wrong address shows itself at once
TAIL_IDS = 12  # enough tokens to hold any think tag and the white space behind it


@dataclass
class ServerFacts:
    """Whom the answers are from."""

    url: str
    engine: str  # "sglang", "vllm", or "unknown"
    version: str
    model: str
    model_folder: str = ""
    sampling_defaults: str = ""  # "openai": it was started to ignore generation_config.json
    reasoning_parser: str | None = None  # None also where it does not say
    tool_call_parser: str | None = None
    prefill: Prefill = Prefill.UNKNOWN

    @property
    def label(self) -> str:
        """Engine and version in two words."""
        return f"{self.engine} {self.version}".strip()


async def read_facts(client: ChatClient, model: str) -> ServerFacts:
    """Ask the server who it is.

    Raises:
        ConfigError: it serves another model than `model`, or several and none is named.
        RedraftError: it cannot be reached, or is no OpenAI-compatible server.
    """
    try:
        listed = await client.ask("GET", "/v1/models", None, _models, START_PATIENCE_S)
    except FailedError as err:
        mend = "give the address of a server with /v1/models and /v1/chat/completions"
        raise RedraftError("not an OpenAI-compatible server", where=client.url, why=err.why, mend=mend) from None
    chosen = _choose(listed, model, client.url)
    info = await client.look("/server_info") or await client.look("/get_server_info")
    info = info if isinstance(info, dict) else {}
    if "tokenizer_path" in info or "internal_states" in info:
        return ServerFacts(
            client.url, "sglang", str(info.get("version") or ""), chosen["id"], str(info.get("model_path") or ""),
            str(info.get("sampling_defaults") or ""), info.get("reasoning_parser"), info.get("tool_call_parser"),
        )  # fmt: skip
    version = await client.look("/version")
    told = str(version.get("version") or "") if isinstance(version, dict) else ""
    engine = "vllm" if chosen.get("owned_by") == "vllm" else "unknown"
    return ServerFacts(client.url, engine, told, chosen["id"], str(chosen.get("root") or ""))


def check_tools(facts: ServerFacts, with_tools: int) -> None:
    """Refuse to ask an SGLang without a tool-call parser for tool calls: they would come back as text.

    Raises:
        ConfigError: naming the flag.
    """
    if with_tools and facts.engine == "sglang" and not facts.tool_call_parser:
        raise ConfigError(
            "the server cannot tell tool calls from text",
            where=facts.url,
            why=f"{with_tools} records offer tools, and it runs without a tool-call parser",
            mend="start it with --tool-call-parser (kimi_k2 for Kimi-K2 and K2.5), or leave such records out",
        )


async def ask_prefill(client: ChatClient, model: str, prompt_ids: list[int]) -> Prefill:
    """How prompts end, from the tokens of one of them."""
    end = await read_back(client, model, prompt_ids[-TAIL_IDS:])
    return Prefill.UNKNOWN if end is None else prefill_of(end)  # unknown: the tags in the texts must do


async def read_back(client: ChatClient, model: str, ids: list[int]) -> str | None:
    """Text of tokens as the server spells them (`/detokenize` of SGLang and vLLM); None where it has no such path."""
    body = {"model": model, "tokens": ids, "skip_special_tokens": False}
    try:
        return await client.ask("POST", "/detokenize", body, _text)
    except (FailedError, ConfigError):
        return None


def _models(body: Any) -> list[dict[str, Any]]:
    data = body.get("data") if isinstance(body, dict) else None
    listed = data if isinstance(data, list) else []
    models = [one for one in listed if isinstance(one, dict) and isinstance(one.get("id"), str)]
    if not models:
        raise UnusableError("/v1/models lists no model")
    return models


def _choose(listed: list[dict[str, Any]], model: str, url: str) -> dict[str, Any]:
    names = [one["id"] for one in listed]
    if model:
        if model not in names:
            why = f"{model!r} is not among {', '.join(names[:5])}"
            raise ConfigError("the server has no such model", where="regenerate.model", why=why, mend=f"ask {url}")
        return listed[names.index(model)]
    if len(names) > 1:
        why = f"{url} lists {', '.join(names[:5])}"
        raise ConfigError("which model?", where="regenerate.model", why=why, mend="name one of them")
    return listed[0]


def _text(body: Any) -> str:
    text = (body.get("text") or body.get("prompt")) if isinstance(body, dict) else None
    if not isinstance(text, str):
        raise UnusableError("no text")
    return text
