"""One request to an OpenAI-compatible server, with retries; the standard library only.

Busy, restarting and garbled servers are tried again with growing pauses; what a server refuses for this one request is
`Refused`; what would be refused for every request is a RequestError.
"""

from __future__ import annotations

import http.client
import json
import random
import time
import urllib.error
import urllib.request
from typing import Any

import msgspec

from protocol.errors import RequestError, RunError

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
_ROW_AT_FAULT = (400, 413, 422)
_AGAIN = (408, 409, 425, 429)


class Refused(Exception):
    """The server will not answer this request, whenever it is asked."""


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """`url` ends in /v1; `key` is sent as a bearer token. A request may take `timeout_s` and is tried again `retries`
    times."""

    url: str
    key: str = ""
    timeout_s: float = 600.0
    retries: int = 5

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to a chat completion, which has a choice with a message. Raises Refused, RequestError for what
        fails for all, RunError for a server that is out of reach."""
        return self._ask("/chat/completions", body, _is_completion)

    def only_model(self) -> str:
        """The name of the model that is served. Raises RequestError when there is not just one."""
        found = self._ask("/models", None, lambda answer: isinstance(answer.get("data"), list))
        names = [str(model.get("id")) for model in found["data"] if isinstance(model, dict)]
        if len(names) != 1:
            raise RequestError(f"--server {self.url} serves {', '.join(names) or 'nothing'}: name one, --served-model")
        return names[0]

    def _ask(self, path: str, body: dict[str, Any] | None, sound: Any) -> dict[str, Any]:
        pause_s, problem = FIRST_PAUSE_S, ""
        for attempt in range(self.retries + 1):
            if attempt:
                # Spread out, so that many threads do not come back at once.
                time.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(FIRST_PAUSE_S * 2**attempt, LONGEST_PAUSE_S)
            try:
                answer = self._once(path, body)
                if isinstance(answer, dict) and sound(answer):
                    return answer
                problem = "the answer is not what such a server gives"
            except urllib.error.HTTPError as error:
                said = f"{error.code}: {_message(error)}"
                if error.code in _ROW_AT_FAULT:
                    raise Refused(said) from None
                if error.code < 500 and error.code not in _AGAIN:
                    raise RequestError(f"--server {self.url}{path}: {said}") from None
                problem = said
                pause_s = max(pause_s, _asked_to_wait_s(error))
            except ValueError as error:
                problem = f"the answer is no JSON ({error})"
            except (OSError, http.client.HTTPException) as error:
                problem = str(error) or type(error).__name__
        raise RunError(f"{self.url}{path}: {problem}; tried {self.retries + 1} times. Start again to go on from here")

    def _once(self, path: str, body: dict[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url + path, data, headers)
        except ValueError:
            raise RequestError(f"--server {self.url}: write http://HOST:PORT/v1") from None
        with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
            return json.loads(response.read())


def _is_completion(answer: dict[str, Any]) -> bool:
    choices = answer.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return isinstance(first, dict) and isinstance(first.get("message"), dict)


def _message(error: urllib.error.HTTPError) -> str:
    try:
        said = json.loads(error.read())
        said = said.get("error", said)
        return str(said.get("message", said) if isinstance(said, dict) else said)[:300]
    except (ValueError, OSError, AttributeError, http.client.HTTPException):
        return str(error.reason)


def _asked_to_wait_s(error: urllib.error.HTTPError) -> float:
    asked = error.headers.get("Retry-After", "")
    return min(float(asked), 2 * LONGEST_PAUSE_S) if asked.isdecimal() else 0.0
