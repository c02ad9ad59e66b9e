"""JSON from a server, one request at a time, with bounded patience (`eagle3.patience`)."""

from __future__ import annotations

import time
from typing import Any

import httpx

from eagle3.errors import RedraftError
from eagle3.patience import Backoff, message_of, not_json, retry_after, worth_another_try

RETRIES = 4  # of one request
BACKOFF = Backoff(first_s=1.0, longest_s=16.0)
CONNECT_TIMEOUT_S = 10.0
sleep, clock = time.sleep, time.monotonic


class NoAnswerError(RedraftError):
    """A server gave no usable answer; `status` is that of its refusal, 0 where it gave none."""

    def __init__(self, what: str, *, status: int = 0, **clauses: str) -> None:
        super().__init__(what, **clauses)
        self.status = status


class _TroubleError(Exception):
    """A try that failed and may be repeated."""

    def __init__(self, what: str, why: str, status: int = 0, asked_s: float = 0.0) -> None:
        super().__init__(what)
        self.what, self.why, self.status, self.asked_s = what, why, status, asked_s


class PatientClient:
    """Asks servers, and asks again what may fare better.

    Asked again, `retries` times with growing pauses: where nobody answers or the connection breaks, on 408, 425, 429
    and 5xx, and when the answer is no whole JSON. Not asked again: on any other refusal, and when an answer is not
    whole in time, for the next would not be either. So a request takes `timeout_s` and its pauses, at most.

    Args:
        timeout_s: for one whole answer, however slowly its bytes come.
        retries: of one request.
        client: another HTTP client (tests).
    """

    def __init__(self, timeout_s: float, retries: int = RETRIES, client: httpx.Client | None = None) -> None:
        self.timeout_s, self.retries = timeout_s, retries
        # No proxy of the environment: it knows no local server.
        self._http = client or httpx.Client(
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S)), trust_env=False
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def json(self, method: str, url: str, body: Any = None) -> Any:
        """The JSON of an answer.

        Raises:
            NoAnswerError: there is none; `what` and `why` say how the last try failed.
        """
        failed = 0
        while True:
            try:
                return self._once(method, url, body)
            except _TroubleError as err:
                failed += 1
                if failed > self.retries:
                    raise NoAnswerError(
                        err.what,
                        status=err.status,
                        where=url,
                        why=f"{err.why} ({failed} tries)",
                        mend="see that it runs, and what its log says",
                    ) from None
                pause = BACKOFF.pause(failed, err.asked_s)
            sleep(pause)

    def _once(self, method: str, url: str, body: Any) -> Any:
        try:
            response = self._whole(method, url, body)
        except httpx.ReadTimeout:
            raise self._late(url) from None
        except httpx.HTTPError as err:
            away = isinstance(err, httpx.ConnectError | httpx.ConnectTimeout)
            what = "the server does not answer" if away else "the connection broke"
            raise _TroubleError(what, f"{type(err).__name__}: {err}") from None
        status = response.status_code
        if worth_another_try(status):
            what = f"the server answered {status}"
            raise _TroubleError(what, message_of(response), status, retry_after(response))
        if status >= 300:
            raise NoAnswerError(
                "the server refused the request",
                status=status,
                where=url,
                why=f"status {status}: {message_of(response)}",
                mend="see the server's log",
            )
        try:
            return response.json()
        except ValueError:
            raise _TroubleError("the server's answer is not whole JSON", not_json(response)) from None

    def _whole(self, method: str, url: str, body: Any) -> httpx.Response:
        """The answer with all its bytes; the time-outs of the HTTP client hold for the pause between two of them."""
        deadline = clock() + self.timeout_s
        with self._http.stream(method, url, json=body) as response:
            parts = []
            for part in response.iter_bytes():
                parts.append(part)
                if clock() > deadline:
                    raise self._late(url)
        headers = {name: response.headers[name] for name in ("content-type", "retry-after") if name in response.headers}
        return httpx.Response(response.status_code, headers=headers, content=b"".join(parts))

    def _late(self, url: str) -> NoAnswerError:
        return NoAnswerError(
            "no whole answer in time",
            where=url,
            why=f"{self.timeout_s:g} s passed",
            mend="see in the server's log what it is doing, or allow more time",
        )
