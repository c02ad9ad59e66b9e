"""One server asked over HTTP with bounded patience: what is worth another try, what is not, and when it is gone."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import httpx

from data_prep.regenerate.config import RegenerateConfig
from eagle3.errors import ConfigError, RedraftError

LONGEST_BACKOFF_S = 30.0
UNHEARD = 3  # times the patience that one request is kept while others are answered and it meets nobody
LONGEST_POLL_S = 5.0  # between two looks at a server that cannot be reached
CONNECT_TIMEOUT_S = 10.0
AWAY = (502, 503, 504)  # what stands in for a server that is not there
AGAIN = (408, 425, 429)  # of the 4xx, those that say "not now"
POINTLESS = (401, 403, 404, 405)  # no request of this run will fare better
_SHOWN = 300  # characters of a server's own message
T = TypeVar("T")


class ServerGone(RedraftError):
    """The server cannot be reached, or answers nothing but errors; asking on is pointless."""


class FailedError(Exception):
    """This request will get no answer; the message is one clause.

    Args:
        why: the server's own line, or what is wrong with its answer.
        blame: "request" when the server says that the request is bad, "server" otherwise.
    """

    def __init__(self, why: str, blame: str) -> None:
        super().__init__(why)
        self.why, self.blame = why, blame


class UnusableError(Exception):
    """An answer that came but cannot be read; another try may fare better."""


@dataclass
class _Trouble(Exception):
    """A try that failed and may be repeated."""

    why: str
    away: bool = False  # nobody was there to answer
    wait_s: float = 0.0  # what the server asks to be waited

    def __hash__(self) -> int:
        return id(self)


class ChatClient:
    """Asks one server; holds the connections, so use it as an async context manager.

    Args:
        url: of the server, with or without a final `/v1`.
        cfg: patience and concurrency.

    Raises:
        ConfigError: `cfg.api_key_env` names no variable.
    """

    def __init__(self, url: str, cfg: RegenerateConfig) -> None:
        self.url, self._auth = _without_login(url.rstrip("/").removesuffix("/v1").rstrip("/"))
        self._cfg = cfg
        self._key = _api_key(cfg.api_key_env)
        self._heard = -1.0  # when the server last gave a sensible answer
        self._dice = random.Random()  # spreads the retries; nothing that is kept hangs on it
        self._http = self._client()

    def _client(self) -> httpx.AsyncClient:
        most = self._cfg.concurrency
        return httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            auth=self._auth if not self._key else None,
            timeout=httpx.Timeout(self._cfg.timeout_s, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=most, max_keepalive_connections=most),
            trust_env=False,
        )

    async def __aenter__(self) -> ChatClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def look(self, path: str, timeout_s: float = 30.0) -> Any:
        """JSON of one GET, or None: for what a server may or may not tell. No retries."""
        try:
            response = await self._http.get(path, timeout=timeout_s)
            return response.json() if response.status_code == 200 else None
        except (httpx.HTTPError, ValueError):
            return None

    async def ask(
        self, method: str, path: str, body: Any, read: Callable[[Any], T], patience_s: float | None = None
    ) -> T:
        """Send one request until it is answered, and read the answer.

        Tries that found nobody there cost nothing but time, up to `patience_s` (default `cfg.outage_s`); every other
        failed try costs one of `cfg.retries`.

        Args:
            method: "GET" or "POST".
            path: below the server's address.
            body: JSON to send.
            read: turns the answer's JSON into what is wanted; raises UnusableError.
            patience_s: how long a server that is away is waited for.

        Raises:
            FailedError: the request is bad, or all its tries failed.
            ServerGone: no request was answered for `patience_s`.
            ConfigError: the server wants another key, or knows no such path or model.
        """
        patience_s = self._cfg.outage_s if patience_s is None else patience_s
        away_since, tries, looks = -1.0, 0, 0
        while True:
            began = time.monotonic()
            try:
                return read(await self._once(method, path, body))
            except UnusableError as err:
                trouble = _Trouble(str(err))
            except _Trouble as err:
                trouble = err
            if trouble.away:
                away_since = began if away_since < 0 else away_since
                self._check_patience(away_since, patience_s, trouble)
                await self._sleep(max(trouble.wait_s, min(self._growing(looks), LONGEST_POLL_S)))
                looks += 1
                continue
            away_since, looks, tries = -1.0, 0, tries + 1
            if tries > self._cfg.retries:
                raise FailedError(f"{trouble.why} ({tries} tries)", "server")
            await self._sleep(max(trouble.wait_s, self._growing(tries - 1)))

    def _growing(self, step: int) -> float:
        """Seconds before a retry: doubled step by step, spread so that waiting requests do not come back as one."""
        return min(self._cfg.backoff_s * 2 ** min(step, 30), LONGEST_BACKOFF_S) * self._dice.uniform(0.5, 1.0)

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, max(self._cfg.outage_s, LONGEST_BACKOFF_S)))

    def _check_patience(self, away_since: float, patience_s: float, trouble: _Trouble) -> None:
        now = time.monotonic()
        waited, silent = now - away_since, now - max(away_since, self._heard)
        if silent <= patience_s:
            if waited > UNHEARD * patience_s:  # others are answered all the while
                raise FailedError(f"{trouble.why} for {waited:.0f} s", "server")
            return
        raise ServerGone(
            "the server cannot be reached",
            where=self.url,
            why=f"{trouble.why}, for {silent:.0f} s",
            mend="see that it runs (its log, its address), then run the same command again: finished answers are kept",
        )

    async def _once(self, method: str, path: str, body: Any) -> Any:
        try:
            async with asyncio.timeout(self._cfg.timeout_s):
                response = await self._http.request(method, path, json=body)
        except (httpx.ConnectError, httpx.ConnectTimeout) as err:
            raise _Trouble(f"no connection: {self._clean(str(err) or type(err).__name__)}", away=True) from None
        except (TimeoutError, httpx.TimeoutException):
            raise _Trouble(f"no answer in {self._cfg.timeout_s:g} s") from None
        except httpx.HTTPError as err:
            raise _Trouble(f"the connection broke: {self._clean(str(err) or type(err).__name__)}") from None
        self._judge(response, path)
        try:
            answer = response.json()
        except ValueError:
            raise _Trouble(f"the answer is no whole JSON ({len(response.content)} bytes)") from None
        self._heard = time.monotonic()
        return answer

    def _judge(self, response: httpx.Response, path: str) -> None:
        status = response.status_code
        if status < 300:
            return
        said = self._clean(_message(response))
        if status in AGAIN or status >= 500:
            raise _Trouble(f"the server answered {status}: {said}", away=status in AWAY, wait_s=_retry_after(response))
        self._heard = time.monotonic()
        if status in POINTLESS:
            mends = {404: "check the address and regenerate.model", 405: "check the address"}
            raise ConfigError(
                f"the server refuses every request ({status})",
                where=f"{self.url}{path}",
                why=said,
                mend=mends.get(status, "name the variable with a valid key in regenerate.api_key_env"),
            )
        raise FailedError(f"the server answered {status}: {said}", "request")

    def _clean(self, text: str) -> str:
        """A text from outside in one line, without the key that a server may have echoed."""
        if self._key:
            text = text.replace(self._key, "***")
        return " ".join(text.split())[:_SHOWN]


def _api_key(variable: str) -> str:
    if not variable:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(
            "no API key", where="regenerate.api_key_env", why=f"the environment has no variable {variable}",
            mend=f"export {variable}, or empty the setting for a server that wants none",
        )  # fmt: skip
    return key


def _without_login(url: str) -> tuple[str, tuple[str, str] | None]:
    """The address as it may be written down, and the login that stood in it."""
    parts = urlsplit(url)
    if parts.username is None:
        return url, None
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=host)), (parts.username, parts.password or "")


def _message(response: httpx.Response) -> str:
    """What the server says about an error: the message of its JSON, or the start of its text."""
    try:
        body = response.json()
        error = body.get("error", body) if isinstance(body, dict) else body
        text = error.get("message") or error.get("detail") or error if isinstance(error, dict) else error
    except ValueError:
        text = response.text
    return str(text) or "no message"


def _retry_after(response: httpx.Response) -> float:
    """Seconds that a Retry-After header asks for: a number, or a date (RFC 9110, 10.2.3); 0 without one."""
    text = response.headers.get("retry-after", "").strip()
    if text.isdigit():
        return float(text)
    try:
        return max((parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds(), 0.0)
    except (ValueError, TypeError):
        return 0.0
