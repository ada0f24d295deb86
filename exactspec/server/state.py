"""What the routes share, and the ways to answer that they have in common."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from exactspec.server.engine_client import EngineClient
from exactspec.server.errors import ApiError, bad_request
from exactspec.server.formatting import TokenTexts
from exactspec.server.generation import Arrival, Generation, Prompt, rid_of
from exactspec.server.metrics import Metrics
from exactspec.server.options import ServeOptions

T = TypeVar("T")
LONG_TEXT = 100_000  # characters
GONE = 499  # never sent: there is nobody to read it
DONE = b"data: [DONE]\n\n"
_json = msgspec.json.Encoder()


@dataclass(eq=False)
class Server:
    """One HTTP process."""

    options: ServeOptions
    client: EngineClient
    metrics: Metrics
    tokenizer: Any = None
    texts: TokenTexts = field(default_factory=lambda: TokenTexts(None))
    draining: bool = False
    in_flight: int = 0
    started: float = field(default_factory=time.time)
    arrivals: weakref.WeakSet[Arrival] = field(default_factory=weakref.WeakSet)  # on their way to the engine
    _tokenizing: threading.Lock = field(default_factory=threading.Lock)  # fast tokenizers mind concurrent calls
    _tokenizing_long: threading.Lock = field(default_factory=threading.Lock)
    _for_long: Any = None  # a copy of the tokenizer
    _longest_token: int = 0  # bytes

    def set_tokenizer(self, tokenizer: Any) -> None:
        self.tokenizer, self._for_long = tokenizer, None
        self.texts = TokenTexts(tokenizer)
        self._longest_token = max((len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)), default=0)

    def check_available(self) -> None:
        if self.draining:
            raise ApiError(503, "the server is stopping", retry_after=30)
        if self.tokenizer is None and self.client.status != "dead":
            raise ApiError(503, "the server is starting", retry_after=5)
        self.client.check_available()

    def arrival(self) -> Arrival:
        """An HTTP request that has been read: aborts reach it from now on."""
        arrival = Arrival()
        self.arrivals.add(arrival)
        return arrival

    def abort(self, prefix: str) -> None:
        """Aborts every sample whose id begins with `prefix`, wherever it is on its way."""
        for arrival in self.arrivals:
            if not arrival.over:
                arrival.aborted.append(prefix)
        ids = [(request_id, rid_of(request_id)) for request_id in self.client.active()]
        self.client.abort([request_id for request_id, rid in ids if rid is not None and rid.startswith(prefix)])

    def generation(self, prompts: list[Prompt], names: dict[str, str], arrival: Arrival) -> Generation:
        """Checks and prepares all prompts of an HTTP request; nothing runs yet."""
        total = sum(prompt.params.n for prompt in prompts)
        if total > self.options.max_batch:
            raise ApiError(400, f"n: prompts times samples is {total}; at most {self.options.max_batch} are allowed")
        limit = self.options.request_timeout or None
        return Generation(self.client, self.tokenizer, prompts, names, self.metrics, limit, arrival)

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) < 2_000 and self._tokenizing.acquire(blocking=False):  # shorter than a hop to the thread
            try:
                return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
            finally:
                self._tokenizing.release()
        if len(text) < LONG_TEXT:
            work = functools.partial(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)
            return await asyncio.to_thread(self._locked, self._tokenizing, work)
        return await asyncio.to_thread(self._encode_long, text, add_special_tokens)

    def check_size(self, name: str, num_characters: int) -> None:
        """Raises ApiError for a prompt that no context can hold: its tokens need not be counted for that."""
        most = int(self.client.info.get("context_length") or 0) * self._longest_token
        if most and num_characters > most:
            raise bad_request(name, f"has {num_characters} characters; the context can hold {most} at the very most")

    def _encode_long(self, text: str, add_special_tokens: bool) -> list[int]:
        """With a tokenizer of their own: nobody else waits for long texts."""
        with self._tokenizing_long:
            if self._for_long is None:
                with self._tokenizing:
                    self._for_long = copy.deepcopy(self.tokenizer)
            ids: list[int] = self._for_long.encode(text, add_special_tokens=add_special_tokens)
            return ids

    async def chat_ids(self, messages: list[dict[str, Any]], generation_prompt: bool, **arguments: Any) -> list[int]:
        """Raises RequestError when the template refuses, TypeError for arguments it does not know."""
        work = functools.partial(self.tokenizer.apply_chat_template, messages, generation_prompt, **arguments)
        return await asyncio.to_thread(self._locked, self._tokenizing, work)

    @staticmethod
    def _locked(lock: threading.Lock, work: Callable[[], list[int]]) -> list[int]:
        with lock:
            return work()


def server_of(request: Request) -> Server:
    return request.app.state.server


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(_json.encode(content), status, headers, media_type="application/json")


def to_json(content: Any) -> bytes:
    return _json.encode(content)


def sse(content: Any) -> bytes:
    """An event. U+0085, U+2028 and U+2029 are escaped: clients that cut decoded text into lines cut there as well."""
    data = _json.encode(content)
    if not data.isascii():
        data = (
            data.replace(b"\xc2\x85", b"\\u0085")
            .replace(b"\xe2\x80\xa8", b"\\u2028")
            .replace(b"\xe2\x80\xa9", b"\\u2029")
        )
    return b"data: " + data + b"\n\n"


class EventStream(Response):
    """Server-sent events as they come, ended by DONE. When the client disconnects, `events` is closed.

    Each piece is a write of its own to the socket, so what comes at one time should come in one piece.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await unless_gone(receive, self._pump(send))
        except ApiError as error:
            if error.status != GONE:
                raise

    async def _pump(self, send: Send) -> None:
        ended = False
        async with contextlib.aclosing(self.events) as events:
            async for data in events:
                ended = data.endswith(DONE)  # events are JSON: nothing else ends like this
                await send({"type": "http.response.body", "body": data, "more_body": not ended})
        if not ended:
            await send({"type": "http.response.body", "body": b""})


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Runs `work`; cancels it when the client disconnects (ApiError 499)."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiError(GONE, "the client has gone")
    finally:
        for pending in (task, watcher):
            if not pending.done():
                pending.cancel()
                with contextlib.suppress(asyncio.CancelledError, ApiError):
                    await pending


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
