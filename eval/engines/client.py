"""Ask a server over HTTP with bounded patience, many prompts at a time; each failure is one line."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx

from eagle3.errors import RedraftError
from eval.engines.base import Ask, BatchRun, Generation

BACK_OFF_S = 0.5  # before the second try; doubled for each further one
LONGEST_BACK_OFF_S = 8.0
CONNECT_TIMEOUT_S = 10.0
SETTLE_S = 4.0  # for a server's end to become known, once it cannot be reached
_SHOWN = 200  # characters of a server's own message


class ServerGone(RedraftError):
    """The server has ended or cannot be reached any more; asking it again is pointless."""


class _PassingTrouble(Exception):
    """A failure that another try may not meet."""

    def __init__(self, what: str, why: str, unreachable: bool = False) -> None:
        super().__init__(what)
        self.what, self.why, self.unreachable = what, why, unreachable


class JsonServer:
    """A server that answers JSON.

    Retried, `retries` times with growing pauses: a refused or broken connection, a 5xx or 429 answer, an answer that
    is no JSON. Not retried: any other 4xx, and an answer that does not come in time, for the next would not either.

    Args:
        url: of the server; proxies of the environment are not used.
        timeout_s: for one whole request.
        retries: of one request.
        gone: for a server started here: a clause saying why it is dead, or nothing while it lives.
    """

    def __init__(self, url: str, timeout_s: float, retries: int, gone: Callable[[], str] | None = None) -> None:
        self.url = url.rstrip("/")
        self.timeout_s, self.retries = timeout_s, retries
        self._can_tell = gone is not None
        self._gone = gone or (lambda: "")
        self._lost = ""  # why it is unreachable, once all tries to connect have failed

    def get(self, path: str) -> Any:
        """JSON of one GET.

        Raises:
            RedraftError: no usable answer.
        """
        return asyncio.run(self._get(path, self._json))

    def get_text(self, path: str) -> str:
        """Text of one GET.

        Raises:
            RedraftError: no usable answer.
        """
        return str(asyncio.run(self._get(path, lambda response: response.text)))

    async def _get(self, path: str, read: Callable[[httpx.Response], Any]) -> Any:
        async with self._client(1) as client:
            return await self._tried(client, "GET", path, None, read)

    def ask_all(
        self,
        asks: Sequence[Ask],
        one: Callable[[Callable[[str, Any], Awaitable[Any]], Ask], Awaitable[Generation]],
        concurrency: int,
        done: Callable[[int], None] | None = None,
    ) -> BatchRun:
        """Answer every ask, `concurrency` at a time; what fails is named and the rest goes on.

        Args:
            asks: the prompts.
            one: turns an ask into a generation by means of `post(path, body)`.
            concurrency: requests under way at any moment.
            done: called with 1 as each ask ends.

        Raises:
            ServerGone: the server is dead already.
        """
        self._check_alive()
        return asyncio.run(self._ask_all(asks, one, concurrency, done))

    async def _ask_all(
        self,
        asks: Sequence[Ask],
        one: Callable[[Callable[[str, Any], Awaitable[Any]], Ask], Awaitable[Generation]],
        concurrency: int,
        done: Callable[[int], None] | None,
    ) -> BatchRun:
        slots = asyncio.Semaphore(concurrency)
        failures: dict[str, str] = {}

        async with self._client(concurrency) as client:

            async def post(path: str, body: Any) -> Any:
                return await self._tried(client, "POST", path, body, self._json)

            async def answer(ask: Ask) -> Generation | None:
                async with slots:
                    try:
                        return await one(post, ask)
                    except RedraftError as err:
                        failures[ask.id] = str(err)
                        return None
                    finally:
                        if done is not None:
                            done(1)

            began = time.perf_counter()
            generations = await asyncio.gather(*(answer(ask) for ask in asks))
            seconds = time.perf_counter() - began
        return BatchRun(list(generations), failures, seconds)

    def _client(self, connections: int) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.url,
            timeout=httpx.Timeout(self.timeout_s, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=connections),
            trust_env=False,
        )

    def _check_alive(self) -> None:
        why = self._gone() or self._lost
        if why:
            raise ServerGone("the server is gone", where=self.url, why=why, mend="start it again")

    async def _settle(self) -> None:
        """Wait a moment for the cause: a dead server's log says more than its closed port."""
        deadline = time.monotonic() + SETTLE_S
        while self._can_tell and not self._gone() and time.monotonic() < deadline:
            await asyncio.sleep(0.1)

    async def _tried(
        self,
        client: httpx.AsyncClient,
        method: str,
        path: str,
        body: Any,
        read: Callable[[httpx.Response], Any],
    ) -> Any:
        for left in range(self.retries, -1, -1):
            self._check_alive()
            try:
                return read(await self._once(client, method, path, body))
            except _PassingTrouble as err:
                trouble = err
            if left:
                await asyncio.sleep(min(BACK_OFF_S * 2 ** (self.retries - left), LONGEST_BACK_OFF_S))
        if trouble.unreachable:
            await self._settle()
            self._lost = f"{trouble.what} in {self.retries + 1} tries: {trouble.why}"
        self._check_alive()
        raise RedraftError(
            trouble.what,
            where=f"{method} {self.url}{path}",
            why=f"{trouble.why}, {self.retries + 1} tries",
            mend="read the server's log",
        )

    async def _once(self, client: httpx.AsyncClient, method: str, path: str, body: Any) -> httpx.Response:
        """One try.

        Raises:
            _PassingTrouble: worth another try.
            RedraftError: not worth one.
        """
        try:
            async with asyncio.timeout(self.timeout_s):
                response = await client.request(method, path, json=body)
        except (httpx.ConnectError, httpx.ConnectTimeout) as err:
            raise _PassingTrouble("no connection", str(err) or type(err).__name__, unreachable=True) from None
        except (TimeoutError, httpx.TimeoutException):
            raise RedraftError(
                "no answer in time",
                where=f"{method} {self.url}{path}",
                why=f"{self.timeout_s:g} s passed",
                mend="raise eval.server.request_timeout_s, or see in its log what the server is doing",
            ) from None
        except httpx.HTTPError as err:
            raise _PassingTrouble("the connection broke", str(err) or type(err).__name__) from None
        if response.status_code >= 500 or response.status_code == 429:
            raise _PassingTrouble(f"the server answered {response.status_code}", _message(response))
        if response.status_code >= 400:
            raise RedraftError(
                f"the server refused the request ({response.status_code})",
                where=f"{method} {self.url}{path}",
                why=_message(response),
            )
        return response

    @staticmethod
    def _json(response: httpx.Response) -> Any:
        try:
            return response.json()
        except ValueError:
            why = f"{len(response.content)} bytes that end in {response.text[-20:]!r}"
            raise _PassingTrouble("the answer is no whole JSON", why) from None


def _message(response: httpx.Response) -> str:
    """What the server says about an error: the message of its JSON, or the start of its text."""
    try:
        body = response.json()
        error = body.get("error", body)
        text = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        text = response.text
    return " ".join(str(text).split())[:_SHOWN] or "no message"
