"""One server asked over HTTP with bounded patience: what is worth another try, what is not, and when it is gone."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import httpx

from data_prep.regenerate.config import RegenerateConfig
from eagle3.errors import ConfigError, RedraftError
from eagle3.patience import AWAY, Backoff, message_of, not_json, one_line, retry_after, worth_another_try

UNHEARD = 3  # times the patience that one request is kept while others are answered and it meets nobody
LONGEST_POLL_S = 5.0  # between two looks at a server that cannot be reached
LEAST_ASKED_S = 30.0  # up to which a Retry-After is heeded whatever the patience
CONNECT_TIMEOUT_S = 10.0
POINTLESS = (401, 403, 404, 405)  # no request of this run will fare better
sleep, clock, limit = asyncio.sleep, time.monotonic, asyncio.timeout
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
        gone: for a server started here: a clause saying why it is dead, or nothing while it lives.

    Raises:
        ConfigError: `cfg.api_key_env` names no variable.
    """

    def __init__(self, url: str, cfg: RegenerateConfig, gone: Callable[[], str] | None = None) -> None:
        self.url, self._auth = _without_login(url.rstrip("/").removesuffix("/v1").rstrip("/"))
        self._cfg = cfg
        self._key = _api_key(cfg.api_key_env)
        self._heard = -1.0  # when the server last gave a sensible answer
        self._backoff = Backoff(cfg.backoff_s, asked_s=max(cfg.outage_s, LEAST_ASKED_S))
        self._gone = gone or (lambda: "")
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
            ServerGone: no request was answered for `patience_s`, or the server started here has ended.
            ConfigError: the server wants another key, or knows no such path or model.
        """
        patience_s = self._cfg.outage_s if patience_s is None else patience_s
        away_since, tries, looks = -1.0, 0, 0
        while True:
            began = clock()
            try:
                return read(await self._once(method, path, body))
            except UnusableError as err:
                trouble = _Trouble(str(err))
            except _Trouble as err:
                trouble = err
            self._check_alive()
            if trouble.away:
                away_since = began if away_since < 0 else away_since
                self._check_patience(away_since, patience_s, trouble)
                looks += 1
                await sleep(min(self._backoff.pause(looks, trouble.wait_s), max(LONGEST_POLL_S, trouble.wait_s)))
                continue
            away_since, looks, tries = -1.0, 0, tries + 1
            if tries > self._cfg.retries:
                raise FailedError(f"{trouble.why} ({tries} tries)", "server")
            await sleep(self._backoff.pause(tries, trouble.wait_s))

    def _check_alive(self) -> None:
        if why := self._gone():
            raise ServerGone(
                "the server has ended",
                where=self.url,
                why=why,
                mend="mend what its log names, then run the same command again: finished answers are kept",
            )

    def _check_patience(self, away_since: float, patience_s: float, trouble: _Trouble) -> None:
        now = clock()
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
            async with limit(self._cfg.timeout_s):
                response = await self._http.request(method, path, json=body)
        except (httpx.ConnectError, httpx.ConnectTimeout) as err:
            raise _Trouble(f"no connection: {one_line(str(err) or type(err).__name__, self._key)}", away=True) from None
        except (TimeoutError, httpx.TimeoutException):
            raise _Trouble(f"no answer in {self._cfg.timeout_s:g} s") from None
        except httpx.HTTPError as err:
            raise _Trouble(f"the connection broke: {one_line(str(err) or type(err).__name__, self._key)}") from None
        self._judge(response, path)
        try:
            answer = response.json()
        except ValueError:
            raise _Trouble(f"the answer is no whole JSON: {not_json(response, self._key)}") from None
        self._heard = clock()
        return answer

    def _judge(self, response: httpx.Response, path: str) -> None:
        status = response.status_code
        if status < 300:
            return
        said = message_of(response, self._key)
        if worth_another_try(status):
            raise _Trouble(f"the server answered {status}: {said}", away=status in AWAY, wait_s=retry_after(response))
        self._heard = clock()
        if status in POINTLESS:
            mends = {404: "check the address and regenerate.model", 405: "check the address"}
            raise ConfigError(
                f"the server refuses every request ({status})",
                where=f"{self.url}{path}",
                why=said,
                mend=mends.get(status, "name the variable with a valid key in regenerate.api_key_env"),
            )
        raise FailedError(f"the server answered {status}: {said}", "request")


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
