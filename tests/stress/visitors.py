"""Simulates clients that randomly use everything a server offers.

They use a bounded set of conversations, so what they leave behind does not grow with time.
"""

from __future__ import annotations

import base64
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from io import BytesIO
from random import Random
from typing import Any

import httpx
from PIL import Image

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
Action = Callable[[httpx.Client], None]

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
CONVERSATIONS = "/v1/conversations"
EMBEDDER, RANKER = "bert", "rank"
PICTURES = 12
LEAST_OUTPUT_TOKENS = 16  # that the Responses API takes
GONE = (httpx.codes.NOT_FOUND, httpx.codes.INSUFFICIENT_STORAGE)
TEXT = {"type": "text", "text": "And what else?"}
OLLAMA: Json = {"stream": False, "options": {"temperature": 0, "num_predict": REPLY_TOKENS}}


class Unexpected(AssertionError):
    """An answer that a visitor must never get."""


@dataclass
class Visitor:
    """One client with one key. `counts` says what it has done."""

    server: Server
    key: str
    chance: Random
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def actions(self) -> list[Action]:
        return [
            self.chat, self.chat, self.stream, self.cancel, self.tools, self.form, self.complete,
            self.look, self.change, self.prepare, self.quantise, self.see, self.embed, self.rank,
            self.messages, self.ollama, self.respond, self.respond, self.converse, self.tokenise,
            self.complete_as_llama, self.thread, self.compute_in_background,
        ]  # fmt: skip

    def visit(self, until_s: float) -> None:
        """Act until the deadline. Connections are closed on the way out."""
        actions = self.actions
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
            message = self._post(client, CHAT, body)["choices"][0]["message"]
            body["messages"] += [message, {"role": "user", "content": f"And then, {number}?"}]

    def stream(self, client: httpx.Client) -> None:
        body = {**self._body(), "stream": True}
        with client.stream("POST", CHAT, json=body) as response:
            lines = [line for line in response.iter_lines() if line]
        if response.status_code != httpx.codes.OK or lines[-1] != "data: [DONE]":
            raise Unexpected(f"a stream ended with {response.status_code}: {lines[-1:]}")

    def cancel(self, client: httpx.Client) -> None:
        """Hang up in the middle of a reply."""
        body = {**self._body(), "stream": True, "max_tokens": 200}
        left = self.chance.randint(0, 5)
        with client.stream("POST", CHAT, json=body) as response:
            for _ in response.iter_lines():
                left -= 1
                if left < 0:
                    return

    def tools(self, client: httpx.Client) -> None:
        choice = self.chance.choice(["auto", "required", "none"])
        body = {**self._body(), "tools": [TOOL], "tool_choice": choice}
        self._post(client, CHAT, body)

    def form(self, client: httpx.Client) -> None:
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
        self._post(client, CHAT, {**self._body(), "response_format": form})

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

    def quantise(self, client: httpx.Client) -> None:
        """Hold a conversation whose state is stored with fewer bits, from some token on."""
        start = self.chance.choice([0, 64])
        bits = {"kv_bits": self.chance.choice([4, 8]), "kv_quantization_start": start}
        body = {**self._body(), **bits}
        message = self._post(client, CHAT, body)["choices"][0]["message"]
        body["messages"] += [message, {"role": "user", "content": "And then?"}]
        self._post(client, CHAT, body)

    def see(self, client: httpx.Client) -> None:
        """Ask about one of a few pictures, in a dialect by chance."""
        kind, data = "image/png", self._picture()
        url, text = f"data:{kind};base64,{data}", self._topic()
        match self.chance.randrange(4):
            case 0:
                part: Json = {"type": "image_url", "image_url": {"url": url}}
                asked = [{"role": "user", "content": [part, {"type": "text", "text": text}]}]
                self._post(client, CHAT, {**self._body(), "messages": asked})
            case 1:
                source = {"type": "base64", "media_type": kind, "data": data}
                self._message(client, [{"type": "image", "source": source}])
            case 2:
                message = {"role": "user", "content": text, "images": [data]}
                self._post(client, "/api/chat", {**OLLAMA, "messages": [message]})
            case _:
                part = {"type": "input_image", "image_url": url}
                self._response(client, input=[{"role": "user", "content": [part]}], store=False)

    def embed(self, client: httpx.Client) -> None:
        texts = [self._topic() for _ in range(self.chance.randint(1, 3))]
        if self.chance.random() < 0.5:
            found = self._post(client, "/v1/embeddings", {"model": EMBEDDER, "input": texts})
            count = len(found["data"])
        else:
            found = self._post(client, "/api/embed", {"model": EMBEDDER, "input": texts})
            count = len(found["embeddings"])
        if count != len(texts):
            raise Unexpected(f"{count} vectors of {len(texts)} texts")

    def rank(self, client: httpx.Client) -> None:
        documents = [self._topic() for _ in range(3)]
        self._post(
            client, "/v1/rerank", {"model": RANKER, "query": "topic?", "documents": documents}
        )

    def messages(self, client: httpx.Client) -> None:
        """Anthropic's dialect, streamed or not."""
        text = {"type": "text", "text": self._topic(), "cache_control": {"type": "ephemeral"}}
        if self.chance.random() < 0.5:
            self._message(client, [text])
            return
        with client.stream("POST", MESSAGES, json=self._of_message([text], stream=True)) as stream:
            lines = [line for line in stream.iter_lines() if line]
        if stream.status_code != httpx.codes.OK or "message_stop" not in lines[-1]:
            raise Unexpected(f"a stream ended with {stream.status_code}: {lines[-1:]}")

    def ollama(self, client: httpx.Client) -> None:
        if self.chance.random() < 0.5:
            message = {"role": "user", "content": self._topic()}
            self._post(client, "/api/chat", {**OLLAMA, "messages": [message]})
            return
        body = {**OLLAMA, "prompt": self._topic(), "stream": True}
        with client.stream("POST", "/api/generate", json=body) as stream:
            lines = [line for line in stream.iter_lines() if line]
        if stream.status_code != httpx.codes.OK or '"done":true' not in lines[-1]:
            raise Unexpected(f"a stream ended with {stream.status_code}: {lines[-1:]}")

    def respond(self, client: httpx.Client) -> None:
        """Continue a stored response a few times. Some are read again, and some deleted."""
        last = self._response(client, input=self._topic())
        for number in range(self.chance.randrange(MOST_TURNS)):
            body = self._of_response(input=f"And {number}?", previous_response_id=last["id"])
            answer = client.post(RESPONSES, json=body)
            if b'"previous_response_not_found"' in answer.content:  # others needed its room
                return
            self._check(answer, RESPONSES, *GONE)
            if answer.status_code in GONE:
                return
            last = answer.json()
        path = f"{RESPONSES}/{last['id']}"
        for suffix in ("", "/input_items"):
            self._check(client.get(path + suffix), path, *GONE)
        if self.chance.random() < 0.3:
            self._check(client.delete(path), path, *GONE)

    def converse(self, client: httpx.Client) -> None:
        """Begin a conversation object, answer in it, list its items and delete it mostly."""
        item = {"type": "message", "role": "user", "content": self._topic()}
        created = client.post(CONVERSATIONS, json={"items": [item]})
        self._check(created, CONVERSATIONS, httpx.codes.INSUFFICIENT_STORAGE)
        if not created.is_success:
            return
        path = f"{CONVERSATIONS}/{created.json()['id']}"
        body = self._of_response(input="And then?", conversation=created.json()["id"])
        self._check(client.post(RESPONSES, json=body), RESPONSES, *GONE)
        self._check(client.get(f"{path}/items"), path, *GONE)
        if self.chance.random() < 0.8:
            self._check(client.delete(path), path, *GONE)

    def complete_as_llama(self, client: httpx.Client) -> None:
        """The endpoints of llama.cpp's server."""
        body = {"prompt": self._topic(), "n_predict": REPLY_TOKENS, "temperature": 0}
        if self.chance.random() < 0.5:
            self._post(client, "/completion", body)
            return
        with client.stream("POST", "/completion", json={**body, "stream": True}) as stream:
            lines = [line for line in stream.iter_lines() if line]
        if stream.status_code != httpx.codes.OK or '"stop":true' not in lines[-1]:
            raise Unexpected(f"a stream ended with {stream.status_code}: {lines[-1:]}")

    def thread(self, client: httpx.Client) -> None:
        """Let the server keep a conversation, and continue it a few times."""
        text = {"type": "text", "text": self._topic()}
        created = self._of_message([text], thread={"type": "create"})
        last = self._post(client, MESSAGES, created)["id"]
        for _ in range(self.chance.randrange(MOST_TURNS)):
            going_on = {"type": "continue", "previous_message_id": last}
            answer = client.post(MESSAGES, json=self._of_message([], thread=going_on))
            self._check(answer, MESSAGES, *GONE)
            if answer.status_code in GONE:  # others needed its room
                return
            last = answer.json()["id"]

    def compute_in_background(self, client: httpx.Client) -> None:
        """Leave a response to the server. It is cancelled, read until it ends, or forgotten."""
        body = self._of_response(input=self._topic(), background=True)
        created = self._check(client.post(RESPONSES, json=body), RESPONSES, *GONE)
        path = f"{RESPONSES}/{created.json().get('id')}"
        if created.status_code in GONE:
            return
        what = self.chance.randrange(3)
        if what == 0:  # it may have ended already
            self._check(client.post(f"{path}/cancel"), path, *GONE, httpx.codes.BAD_REQUEST)
        elif what == 1:
            with client.stream("GET", path, params={"stream": True}) as stream:
                lines = [line for line in stream.iter_lines() if line]
            if stream.status_code not in (httpx.codes.OK, *GONE):
                raise Unexpected(f"a stream ended with {stream.status_code}: {lines[-1:]}")

    def tokenise(self, client: httpx.Client) -> None:
        self._post(client, "/v1/tokenize", {"content": self._topic()})
        self._post(client, f"{MESSAGES}/count_tokens", self._of_message([TEXT]))

    def _message(self, client: httpx.Client, content: list[Json]) -> None:
        self._post(client, MESSAGES, self._of_message(content))

    @staticmethod
    def _of_message(content: list[Json], **more: Any) -> Json:
        asked = [{"role": "user", "content": [*content, TEXT]}]
        return {"model": "default", "messages": asked, "max_tokens": REPLY_TOKENS, **more}

    def _response(self, client: httpx.Client, **fields: Any) -> Json:
        return self._post(client, RESPONSES, self._of_response(**fields))

    @staticmethod
    def _of_response(**fields: Any) -> Json:
        return {"max_output_tokens": LEAST_OUTPUT_TOKENS, "temperature": 0, **fields}

    def _picture(self) -> str:
        """One of a few pictures, as a file in base64."""
        file = BytesIO()
        Image.new("RGB", (40, 30), (self.chance.randrange(PICTURES), 90, 90)).save(file, "PNG")
        return base64.b64encode(file.getvalue()).decode()

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
