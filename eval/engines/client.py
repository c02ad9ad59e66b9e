"""Ask a server over HTTP with bounded patience, many prompts at a time; each failure is one line."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx

from eagle3.errors import RedraftError
from eagle3.patience import AWAY, Backoff, message_of, not_json, retry_after, worth_another_try
from eval.engines.base import Ask, BatchRun, Generation, ServerGone

BACKOFF = Backoff(first_s=0.5, longest_s=8.0, asked_s=60.0)
CONNECT_TIMEOUT_S = 10.0
LOOK_TIMEOUT_S = 60.0  # for what a server says of itself
GIVE_UP = 4  # requests in a row, or as many as are under way at once, that the server failed: it is asked no further
SETTLE_S = 4.0  # for a server's end to become known, once it cannot be reached
sleep, clock, limit = asyncio.sleep, time.monotonic, asyncio.timeout


class _PassingTrouble(Exception):
    """A failure that another try may not meet."""

    def __init__(self, what: str, why: str, unreachable: bool = False, asked_s: float = 0.0) -> None:
        super().__init__(what)
        self.what, self.why, self.unreachable, self.asked_s = what, why, unreachable, asked_s


class JsonServer:
    """A server that answers JSON.

    Retried, `retries` times with growing pauses: a refused or broken connection, a 5xx, 408, 425 or 429 answer, an
    answer that is no JSON. Prompts are kept for a server that cannot be reached for `outage_s` besides: it may come
    back. Not retried: any other refusal, and an answer that is not whole in time, for the next would not be either.
    Where requests fail by the server's fault one after another, the rest is not asked.

    Args:
        url: of the server; proxies of the environment are not used.
        timeout_s: for one whole request, however slowly its bytes come.
        retries: of one request.
        outage_s: how long a server that cannot be reached is waited for, once it was there.
        gone: for a server started here: a clause saying why it is dead, or nothing while it lives.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float,
        retries: int,
        gone: Callable[[], str] | None = None,
        outage_s: float = 0.0,
    ) -> None:
        self.url = url.rstrip("/")
        self.timeout_s, self.retries, self.outage_s = timeout_s, retries, outage_s
        self._can_tell = gone is not None
        self._gone = gone or (lambda: "")
        self._lost = ""  # why it is given up
        self._in_a_row, self._give_up = 0, GIVE_UP  # requests that it failed since its last answer, and the limit

    def get(self, path: str) -> Any:
        """JSON of one GET.

        Raises:
            RedraftError: no usable answer.
        """
        return asyncio.run(self._get(path, self._json))

    async def _get(self, path: str, read: Callable[[httpx.Response], Any]) -> Any:
        async with self._client(1) as client:
            return await self._tried(client, "GET", path, None, read)

    def gone(self) -> str:
        """Why the server is dead or given up, in one clause; empty while it may be asked."""
        return self._gone() or self._lost

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
            ServerGone: the server is dead already, or died before it answered any.
        """
        self._check_alive()
        self._give_up = max(GIVE_UP, concurrency)
        run = asyncio.run(self._ask_all(asks, one, concurrency, done))
        if all(made is None for made in run.generations):
            self._check_alive()
        return run

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
        if why := self.gone():
            raise ServerGone(
                "the server is gone", where=self.url, why=why, mend="see its log, and start it again", page="engines"
            )

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
        failed, away_since = 0, clock()
        while True:
            self._check_alive()
            try:
                answer = read(await self._once(client, method, path, body))
            except _PassingTrouble as err:
                trouble = err
            else:
                self._in_a_row = 0
                return answer
            failed += 1
            if not trouble.unreachable:
                away_since = clock()
            waited_for = trouble.unreachable and method == "POST" and clock() - away_since < self.outage_s
            if failed > self.retries and not waited_for:
                break
            await sleep(BACKOFF.pause(failed, trouble.asked_s))
        await self._count_failure(trouble.what, f"{trouble.why}, {failed} tries", trouble.unreachable)
        raise RedraftError(
            trouble.what,
            where=f"{method} {self.url}{path}",
            why=f"{trouble.why}, {failed} tries",
            mend="read the server's log",
        )

    async def _count_failure(self, what: str, why: str, unreachable: bool = False) -> None:
        """Note a request that failed by the server's fault, and give the server up where it cannot be reached at all.

        Raises:
            ServerGone: it is given up.
        """
        self._in_a_row += 1
        if unreachable:
            await self._settle()
            self._lost = f"{what}: {why}"
        elif self._in_a_row >= self._give_up:
            self._lost = f"{self._in_a_row} requests in a row failed; the last: {what}: {why}"
        self._check_alive()

    async def _once(self, client: httpx.AsyncClient, method: str, path: str, body: Any) -> httpx.Response:
        """One try.

        Raises:
            _PassingTrouble: worth another try.
            RedraftError: not worth one.
        """
        timeout_s = min(self.timeout_s, LOOK_TIMEOUT_S) if method == "GET" else self.timeout_s
        try:
            async with limit(timeout_s):
                response = await client.request(method, path, json=body)
        except (httpx.ConnectError, httpx.ConnectTimeout) as err:
            raise _PassingTrouble("no connection", str(err) or type(err).__name__, unreachable=True) from None
        except (TimeoutError, httpx.TimeoutException):
            await self._count_failure("no answer in time", f"{timeout_s:g} s passed")
            raise RedraftError(
                "no answer in time",
                where=f"{method} {self.url}{path}",
                why=f"{timeout_s:g} s passed",
                mend="raise eval.server.request_timeout_s, or see in its log what the server is doing",
            ) from None
        except httpx.HTTPError as err:
            raise _PassingTrouble("the connection broke", str(err) or type(err).__name__) from None
        status = response.status_code
        if worth_another_try(status):
            away = status in AWAY  # what stands in for it answers
            raise _PassingTrouble(f"the server answered {status}", message_of(response), away, retry_after(response))
        if status >= 300:
            raise RedraftError(
                f"the server refused the request ({status})",
                where=f"{method} {self.url}{path}",
                why=message_of(response),
                mend="see the server's log",
            )
        return response

    @staticmethod
    def _json(response: httpx.Response) -> Any:
        try:
            return response.json()
        except ValueError:
            raise _PassingTrouble("the answer is no whole JSON", not_json(response)) from None
