"""What the HTTP process and the engine process say to each other: msgpack, over ZeroMQ to the engine and over a socket
(pipe.py) back."""

from __future__ import annotations

from dataclasses import asdict, fields
from functools import lru_cache
from typing import Any

import msgspec

from exactspec.types import FinishReason, Request, RequestStats, SamplingParams, StepOutput, TokenLogprob, TokenSource

Pair = tuple[int, float]
Entry = tuple[int, float | None, list[Pair], list[Pair]]  # token id, logprob, top, chosen
Rows = tuple[bytes, int]  # float32 rows, row length


# ---- to the engine ---------------------------------------------------------------------------------


class Add(msgspec.Struct, tag="add"):
    request_id: str
    prompt_ids: list[int]
    params: dict[str, Any]
    seed: int
    priority: int = 0
    cache_namespace: str = ""
    hidden_states: bool = False
    sampling_mask: str | None = None
    max_drafts: int | None = None


class Abort(msgspec.Struct, tag="abort"):
    request_ids: list[str]
    message: str = "Aborted"


class Call(msgspec.Struct, tag="call"):
    """Asks for a Reply. `what`: ping, stats (sent before the reply), flush (seconds to wait for idleness), pause,
    pause_abort, pause_retract, resume.
    """

    call_id: int
    what: str
    seconds: float = 0.0


class Stop(msgspec.Struct, tag="stop"):
    pass


ToEngine = Add | Abort | Call | Stop


# ---- from the engine -------------------------------------------------------------------------------


class Ready(msgspec.Struct, tag="ready"):
    """The engine is up. `info` holds what the HTTP process must know of the model and its limits."""

    info: dict[str, Any]


class Output(msgspec.Struct, array_like=True):
    """A StepOutput without tensors. `stats` only comes with the finish; cached_tokens always."""

    request_id: str
    token_ids: list[int]
    sources: list[TokenSource]
    cached_tokens: int
    logprobs: list[Entry] | None = None
    finish: tuple[str, int | str | None, str | None] | None = None
    stats: dict[str, Any] | None = None
    prompt_logprobs: list[Entry] | None = None
    next_token: Entry | None = None
    hidden: Rows | None = None
    prompt_hidden: Rows | None = None
    mask: list[tuple[list[int], list[float]]] | None = None


class Outputs(msgspec.Struct, tag="outputs"):
    items: list[Output]


class Refused(msgspec.Struct, tag="refused"):
    """A request that was not let in. status 400 (field and reason) or 503 (try again)."""

    request_id: str
    field: str
    reason: str
    status: int = 400


class Reply(msgspec.Struct, tag="reply"):
    call_id: int
    ok: bool


class Stats(msgspec.Struct, tag="stats"):
    """A snapshot of the engine's counters, sent after steps at most a few times a second."""

    values: dict[str, Any]


class Failed(msgspec.Struct, tag="failed"):
    """The engine cannot start."""

    reason: str


FromEngine = Ready | Outputs | Refused | Reply | Stats | Failed

encoder = msgspec.msgpack.Encoder()
to_engine_decoder = msgspec.msgpack.Decoder(ToEngine)
from_engine_decoder = msgspec.msgpack.Decoder(FromEngine)


_PARAMS = tuple(field.name for field in fields(SamplingParams))

# ---- to and from the vocabulary of the project -------------------------------------------------------


def add_message(request: Request) -> Add:
    params = {name: value for name in _PARAMS if (value := getattr(request.params, name)) not in (None, ())}
    params["max_new_tokens"] = request.params.max_new_tokens  # None means something
    return Add(
        request_id=request.request_id,
        prompt_ids=list(request.prompt_ids),
        params=params,
        seed=request.seed,
        priority=request.priority,
        cache_namespace=request.cache_namespace,
        hidden_states=request.return_hidden_states,
        sampling_mask=request.sampling_mask,
        max_drafts=request.max_drafts,
    )


def pack_output(output: StepOutput) -> Output:
    finish = output.finish
    return Output(
        request_id=output.request_id,
        token_ids=output.token_ids,
        sources=output.sources,
        cached_tokens=output.stats.cached_tokens,
        logprobs=None if output.logprobs is None else [_entry(e) for e in output.logprobs],
        finish=None if finish is None else (finish.kind, finish.matched, finish.message),
        stats=None if finish is None else asdict(output.stats),
        prompt_logprobs=None if output.prompt_logprobs is None else [_entry(e) for e in output.prompt_logprobs],
        next_token=None if output.next_token is None else _entry(output.next_token),
        hidden=_rows(output.hidden_states),
        prompt_hidden=None if output.prompt_hidden is None else _rows(list(output.prompt_hidden)),
        mask=output.sampling_mask,
    )


def unpack_output(message: Output) -> StepOutput:
    """The StepOutput again; hidden states as nested lists of floats."""
    finish = None if message.finish is None else FinishReason(*message.finish)  # type: ignore[arg-type]
    stats = RequestStats(**message.stats) if message.stats else _early_stats(message.cached_tokens)
    return StepOutput(
        request_id=message.request_id,
        token_ids=message.token_ids,
        logprobs=None if message.logprobs is None else [_logprob(e) for e in message.logprobs],
        sources=message.sources,
        finish=finish,
        stats=stats,
        prompt_logprobs=None if message.prompt_logprobs is None else [_logprob(e) for e in message.prompt_logprobs],
        hidden_states=None if message.hidden is None else _lists(message.hidden),
        prompt_hidden=None if message.prompt_hidden is None else _lists(message.prompt_hidden),
        sampling_mask=message.mask,
        next_token=None if message.next_token is None else _logprob(message.next_token),
    )


@lru_cache(maxsize=4096)
def _early_stats(cached_tokens: int) -> RequestStats:
    """What is known of a request before its end. Shared: nobody counts on this side."""
    return RequestStats(cached_tokens=cached_tokens)


def _entry(entry: TokenLogprob) -> Entry:
    return (entry.token_id, entry.logprob, list(entry.top), list(entry.chosen))


def _logprob(entry: Entry) -> TokenLogprob:
    return TokenLogprob(entry[0], entry[1], tuple(entry[2]), tuple(entry[3]))


def _rows(rows: Any) -> Rows | None:
    if rows is None:
        return None
    if not rows:
        return b"", 0
    import torch

    block = torch.stack(list(rows)).float().cpu().contiguous()
    return block.numpy().tobytes(), block.shape[-1]


def _lists(rows: Rows) -> Any:
    import numpy as np

    data, width = rows
    return np.frombuffer(data, dtype=np.float32).reshape(-1, width).tolist() if width else []
