"""Simulates clients that randomly use everything a server offers.

They use a bounded set of conversations, so what they leave behind does not grow with time.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx

from tests.support.server import Server

TOPICS = 24  # conversations per tenant
MOST_TURNS = 4
REPLY_TOKENS = 12
TIMEOUT_S = 120

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}

Json = dict[str, Any]


class Unexpected(AssertionError):
    """An answer that a visitor must never get."""


@dataclass
class Visitor:
    """One client with one key. `counts` says what it has done."""

    server: Server
    key: str
    chance: Random
    counts: Counter[str] = field(default_factory=Counter)

    def visit(self, until_s: float) -> None:
        """Act until the deadline. Connections are closed on the way out."""
        actions: list[Callable[[httpx.Client], None]] = [
            self.chat, self.chat, self.stream, self.cancel, self.tools, self.form, self.complete,
            self.look, self.change, self.prepare,
        ]  # fmt: skip
        headers = {"Authorization": f"Bearer {self.key}"}
        with httpx.Client(base_url=self.server.url, headers=headers, timeout=TIMEOUT_S) as client:
            while time.monotonic() < until_s:
                action = self.chance.choice(actions)
                action(client)
                self.counts[action.__name__] += 1

    def chat(self, client: httpx.Client) -> None:
        """Hold a conversation, starting with its first turn."""
        body = self._body()
        for number in range(self.chance.randint(1, MOST_TURNS)):
            message = self._post(client, "/v1/chat/completions", body)["choices"][0]["message"]
            body["messages"] += [message, {"role": "user", "content": f"And then, {number}?"}]

    def stream(self, client: httpx.Client) -> None:
        body = {**self._body(), "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = [line for line in response.iter_lines() if line]
        if response.status_code != httpx.codes.OK or lines[-1] != "data: [DONE]":
            raise Unexpected(f"a stream ended with {response.status_code}: {lines[-1:]}")

    def cancel(self, client: httpx.Client) -> None:
        """Hang up in the middle of a reply."""
        body = {**self._body(), "stream": True, "max_tokens": 200}
        left = self.chance.randint(0, 5)
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            for _ in response.iter_lines():
                left -= 1
                if left < 0:
                    return

    def tools(self, client: httpx.Client) -> None:
        choice = self.chance.choice(["auto", "required", "none"])
        body = {**self._body(), "tools": [TOOL], "tool_choice": choice}
        self._post(client, "/v1/chat/completions", body)

    def form(self, client: httpx.Client) -> None:
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
        self._post(client, "/v1/chat/completions", {**self._body(), "response_format": form})

    def complete(self, client: httpx.Client) -> None:
        body = {"prompt": self._topic(), "max_tokens": REPLY_TOKENS, "temperature": 0}
        self._post(client, "/v1/completions", body)

    def look(self, client: httpx.Client) -> None:
        path = self.chance.choice(["/v1/cache", "/v1/cache/stats", "/v1/models", "/health"])
        self._check(client.get(path), path)

    def change(self, client: httpx.Client) -> None:
        """Pin, unpin or remove an entry. Another visitor may have removed it in the meantime."""
        entries = client.get("/v1/cache").json()["entries"]
        if not entries:
            return
        path = f"/v1/cache/{self.chance.choice(entries)['cache_key']}"
        asked = [("POST", f"{path}/pin"), ("POST", f"{path}/unpin"), ("DELETE", path)]
        method, path = self.chance.choice([*asked, ("POST", "/v1/cache/gc")])
        response = client.request(method, path)
        self._check(response, path, httpx.codes.NOT_FOUND, httpx.codes.INSUFFICIENT_STORAGE)

    def prepare(self, client: httpx.Client) -> None:
        system = {"role": "system", "content": f"Be brief. {self._topic()}"}
        body = {"messages": [system], "warm": self.chance.random() < 0.5}
        # The budget for pins may be used up, or another visitor may remove the entry.
        path = "/v1/cache/prepare"
        response = client.post(path, json=body)
        self._check(response, path, httpx.codes.INSUFFICIENT_STORAGE, httpx.codes.CONFLICT)

    def _topic(self) -> str:
        return f"Tell me of topic {self.chance.randrange(TOPICS)}. " * 6

    def _body(self) -> Json:
        """A greedy first turn, so that repeating it stores the same state."""
        names: list[Json] = [{}, {"session_id": f"s{self.chance.randrange(TOPICS)}"}]
        return {
            "messages": [{"role": "user", "content": self._topic()}],
            "max_tokens": REPLY_TOKENS,
            "temperature": 0,
            **self.chance.choice(names),
        }

    def _post(self, client: httpx.Client, path: str, body: Json) -> Json:
        answer: Json = self._check(client.post(path, json=body), path).json()
        return answer

    @staticmethod
    def _check(response: httpx.Response, path: str, *also: httpx.codes) -> httpx.Response:
        if response.status_code not in (httpx.codes.OK, *also):
            raise Unexpected(f"{path}: {response.status_code} {response.text[:300]}")
        return response


def visit_together(visitors: list[Visitor], seconds: float) -> None:
    """Run all visitors concurrently, each in a thread. The first failure is raised."""
    failures: list[BaseException] = []
    until_s = time.monotonic() + seconds

    def visit(visitor: Visitor) -> None:
        try:
            visitor.visit(until_s)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=visit, args=(each,)) for each in visitors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
