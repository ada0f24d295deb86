"""POST /generate: SGLang's own API."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from exactspec.server import formatting as f
from exactspec.server.errors import NATIVE_NAMES, ApiError, bad_request, native_event
from exactspec.server.generation import Arrival, Delta, Prompt, Sample
from exactspec.server.params import LogprobPlan, native_params
from exactspec.server.protocol import CompletionBody, GenerateBody, SchemaError, parse_body
from exactspec.server.state import DONE, EventStream, Server, json_response, server_of, sse, to_json, unless_gone
from exactspec.types import TokenSource

REFUSED_IF_SET = (
    "input_embeds", "lora_path", "custom_logit_processor", "image_data", "video_data", "audio_data", "session_params",
    "return_flat_raw_top_logprobs", "return_flat_raw_output_top_logprobs", "return_flat_raw_top_logprobs_b64",
    "return_flat_raw_output_top_logprobs_b64",
)  # fmt: skip


@dataclass(slots=True)
class Wants:
    """What an answer has to hold, per prompt."""

    logprobs: bool = False
    top: int = 0
    token_ids: tuple[int, ...] = ()
    start: int = -1
    mask_mode: str | None = None
    hidden: Any = False


@dataclass(slots=True)
class Job:
    """A parsed /generate body."""

    body: GenerateBody
    prompts: list[Prompt]
    wants: list[Wants]
    single: bool
    interval: int


async def generate(request: Request) -> Response:
    server = server_of(request)
    body = parse_body(GenerateBody, await request.body())
    arrival = server.arrival()
    if body.stream:
        _check_schema_parts(body, server)
        return EventStream(_events(server, body, arrival))
    job = await _parse(body, server)
    generation = server.generation(job.prompts, NATIVE_NAMES, arrival)
    samples = await unless_gone(request.receive, generation.run())
    answers = [answer(server, job, sample) for sample in samples]
    return json_response(answers[0] if job.single else answers)


# ---- the body ----------------------------------------------------------------------------------------


async def _parse(body: GenerateBody, server: Server) -> Job:
    server.check_available()
    for name in REFUSED_IF_SET:
        if getattr(body, name):
            raise bad_request(name, "is not supported")
    field, prompts = _prompts(body)
    single = isinstance(body.text if field == "text" else (body.input_ids or [0])[0], str | int)
    count = len(prompts)
    params = _sampling_params(body, count)
    samples = [p.get("n") or 1 for p in params]  # not checked yet: may be of any type
    if any(n != samples[0] for n in samples):
        raise bad_request("n", "must be the same for all prompts of a batch")
    wants = _wants(body, count, many=samples[0] != 1)
    intervals = [_interval(p.get("stream_interval"), server.options.stream_interval) for p in params]
    rids = rids_of(body.rid, count)
    spaces = namespaces(body, count)
    jobs = []
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            server.check_size("text", len(prompt))
        token_ids = await server.encode(prompt) if isinstance(prompt, str) else prompt
        if not token_ids:
            raise bad_request(field, "is empty; at least one token is needed")
        jobs.append(
            Prompt(
                token_ids=token_ids,
                params=native_params(params[i], _plan(body, wants[i]), server.options),
                rid=rids[i],
                namespace=spaces[i],
                priority=body.priority or 0,
                return_hidden=wants[i].hidden,
                sampling_mask=wants[i].mask_mode,
                max_drafts=body.max_drafts,
            )
        )
    return Job(body, jobs, wants, single and samples[0] == 1, min(intervals))


def _prompts(body: GenerateBody) -> tuple[str, list[Any]]:
    """(field, prompts): input_ids go before text, as they are."""
    if body.input_ids is not None:
        ids = body.input_ids
        if not ids:
            raise bad_request("input_ids", "is empty")
        return "input_ids", [ids] if isinstance(ids[0], int) else list(ids)
    if body.text is None:
        raise bad_request("text", "either text or input_ids is needed")
    if not body.text:
        raise bad_request("text", "is empty")
    return "text", [body.text] if isinstance(body.text, str) else list(body.text)


def _sampling_params(body: GenerateBody, count: int) -> list[dict[str, Any]]:
    params = body.sampling_params
    if not isinstance(params, list):
        return [params or {}] * count
    if len(params) != count:
        raise bad_request("sampling_params", f"{len(params)} given for {count} prompts")
    return params


def _each(value: Any, count: int, name: str) -> list[Any]:
    """One value per prompt: a list is per prompt, anything else is for all."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise bad_request(name, f"{len(value)} given for {count} prompts")
    return value


def namespaces(body: GenerateBody | CompletionBody, count: int) -> list[str]:
    """Which part of the prefix cache each prompt uses."""
    keys, salts = _each(body.extra_key, count, "extra_key"), _each(body.cache_salt, count, "cache_salt")
    return [namespace(key, salt) for key, salt in zip(keys, salts, strict=True)]


def namespace(key: str | None, salt: str | None) -> str:
    """One for each pair: whoever knows half of another's, or how the two are joined, does not get into it."""
    return f"{len(key or '')}:{key or ''}{salt or ''}" if key or salt else ""


def _interval(value: Any, default: int) -> int:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise bad_request("stream_interval", f"must be an integer >= 1, got {value!r}")
    return value


def rids_of(rid: str | list[str] | None, count: int) -> list[str | None]:
    """The id of each prompt's request: a string is the beginning of all."""
    if rid is None or isinstance(rid, str):
        return [rid or None] if count == 1 else [f"{rid}_{i}" if rid else None for i in range(count)]
    if len(set(rid)) != len(rid):
        raise bad_request("rid", "holds duplicates")
    return _each(rid, count, "rid")


def _wants(body: GenerateBody, count: int, *, many: bool) -> list[Wants]:
    lists = ("return_logprob", "logprob_start_len", "top_logprobs_num")
    for name in lists:
        if many and isinstance(getattr(body, name), list):
            raise bad_request(name, "must not be a list with n > 1")
    flags, starts, tops = (_each(getattr(body, name), count, name) for name in lists)
    hidden = _each(body.return_hidden_states, count, "return_hidden_states")
    masks = _each(body.return_sampling_mask, count, "return_sampling_mask")
    modes = _each(body.sampling_logprobs_mode, count, "sampling_logprobs_mode")
    asked = _token_ids(body.token_ids_logprob, count, many)
    result = []
    for i in range(count):
        want = Wants(bool(flags[i]), mask_mode=_mask_mode(masks[i], modes[i]), hidden=_hidden(hidden[i]))
        if want.logprobs:
            want.start = -1 if starts[i] is None else starts[i]
            want.top = tops[i] or 0
            want.token_ids = tuple(asked[i] or ())
            if want.start < -1:
                raise bad_request("logprob_start_len", f"must be -1 (none) or a position, got {want.start}")
        result.append(want)
    return result


def _token_ids(value: Any, count: int, many: bool) -> list[Any]:
    if not value or not any(isinstance(item, list) for item in value):
        return [value] * count
    if many:
        raise bad_request("token_ids_logprob", "must not be a list of lists with n > 1")
    return _each(value, count, "token_ids_logprob")


def _hidden(value: Any) -> Any:
    if value in (None, False, True, "last"):
        return value or False
    raise bad_request("return_hidden_states", f'must be true, false or "last", got {value!r}')


def _mask_mode(wanted: Any, mode: Any) -> str | None:
    if mode is not None and not wanted:
        raise bad_request("sampling_logprobs_mode", "needs return_sampling_mask")
    if mode not in (None, "selected", "support"):
        raise bad_request("sampling_logprobs_mode", f"must be selected or support, got {mode!r}")
    return (mode or "selected") if wanted else None


def _plan(body: GenerateBody, want: Wants) -> LogprobPlan:
    kind = body.logprobs_kind or "scaled"
    if not want.logprobs:
        return LogprobPlan(kind=kind)
    scored = want.start >= 0
    return LogprobPlan(want.top, want.top if scored else None, max(want.start, 0), want.token_ids, kind)


def _check_schema_parts(body: GenerateBody, server: Server) -> None:
    """What a stream still refuses with a status: an unknown key in sampling_params. The rest comes as an event."""
    params = body.sampling_params if isinstance(body.sampling_params, list) else [body.sampling_params or {}]
    for item in params:
        try:
            native_params(item, LogprobPlan(), server.options)
        except ApiError as error:
            if error.bare:
                raise


# ---- the answer --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """What of an answer is told: from the token `since` on, with this text; or all of it."""

    since: int = 0
    text: str | None = None
    prompt_lists: dict[str, Any] | None = None  # the input_* lists, where they have been written before


def answer(server: Server, job: Job, sample: Sample, part: Part = Part()) -> dict[str, Any]:
    """The answer so far, or a part of it."""
    result: dict[str, Any] = {
        "text": sample.text if part.text is None else part.text,
        "output_ids": sample.token_ids[part.since :],
        "meta_info": _meta(server, job, sample, part),
    }
    if job.body.return_prompt_token_ids:
        result["prompt_token_ids"] = list(sample.prompt_ids)
    return result


def _meta(server: Server, job: Job, sample: Sample, part: Part) -> dict[str, Any]:
    since, want = part.since, job.wants[sample.prompt_index]
    meta: dict[str, Any] = {
        "id": sample.rid,
        "finish_reason": finish_object(sample),
        "prompt_tokens": len(sample.prompt_ids),
        "weight_version": "default",
        "num_retractions": sample.stats.num_retracted,
        "completion_tokens": len(sample.token_ids),
        "cached_tokens": sample.stats.cached_tokens,
        "cached_tokens_details": {"device": sample.stats.cached_tokens, "host": 0},
        "reasoning_tokens": 0,
        "sampling_seed": sample.request.seed,
    }
    if want.logprobs:
        meta |= _logprob_lists(server, job, sample, want, part)
    if job.body.return_token_sources:
        meta["token_sources"] = [str(source) for source in sample.sources[since:]]
    if want.mask_mode is not None:
        meta |= _mask_lists(sample, want.mask_mode, since)
    if sample.finish is not None:
        meta |= _final(server, sample)
        if want.hidden:
            meta["hidden_states"] = hidden_states(sample, last=want.hidden == "last")
    return meta


def finish_object(sample: Sample) -> dict[str, Any] | None:
    finish = sample.finish
    if finish is None:
        return None
    if finish.kind == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.kind == "length":
        limit = sample.params.max_new_tokens
        return {"type": "length", "length": len(sample.token_ids) if limit is None else limit}
    return {"type": "abort", "message": finish.message or "Aborted", "status_code": None, "err_type": None}


def _final(server: Server, sample: Sample) -> dict[str, Any]:
    """Keys of the last answer only."""
    now = time.time()
    result: dict[str, Any] = {
        "e2e_latency": (sample.ended or time.perf_counter()) - sample.started,
        "response_sent_to_client_ts": now,
    }
    return result | rounds(server, sample)


def rounds(server: Server, sample: Sample) -> dict[str, Any]:
    """The spec_* counts; none for an answer without a round, or where no drafter was named. Drafts count as correct
    that are tokens of the answer: an end inside a block cuts off the accepted ones behind it."""
    stats = sample.stats
    if not stats.rounds or not server.options.counts_rounds:
        return {}
    correct = sample.sources.count(TokenSource.ACCEPTED)
    by_round = list(stats.accepted_per_round)
    by_round[-1] -= stats.num_accepted - correct
    histogram = [0] * (max(by_round) + 1)
    for accepted in by_round:
        histogram[accepted] += 1
    return {
        "spec_verify_ct": stats.rounds,
        "spec_accept_length": len(sample.token_ids) / stats.rounds,
        "spec_accept_rate": correct / stats.num_drafted if stats.num_drafted else 0.0,
        "spec_num_correct_drafts": correct,
        "spec_num_proposed_drafts": stats.num_drafted,
        "spec_correct_drafts_histogram": histogram,
    }


def _logprob_lists(server: Server, job: Job, sample: Sample, want: Wants, part: Part) -> dict[str, Any]:
    texts = server.texts if job.body.return_text_in_logprobs else None
    shape = {"top": want.top > 0, "chosen": bool(want.token_ids)}
    known = part.prompt_lists
    lists = dict(known) if known else f.native_prompt(sample.prompt_logprobs, texts, **shape)
    output = sample.logprobs[part.since :]
    if sample.params.max_new_tokens == 0 and sample.next_token is not None:
        output = [sample.next_token]  # the token that would have come
    lists |= f.native_output(output, texts, **shape)
    lists["logprobs_kind"] = sample.params.logprobs_kind
    return lists


def _mask_lists(sample: Sample, mode: str, since: int) -> dict[str, Any]:
    rows = list(zip(sample.token_ids[since:], sample.mask[since:], strict=True))
    masks = [ids for _, (ids, _) in rows]
    if mode == "support":
        logprobs: list[Any] = [[f.value(v) for v in values] for _, (_, values) in rows]
    else:
        logprobs = [f.value(values[ids.index(token)]) for token, (ids, values) in rows]
    return {
        "output_token_sampling_mask": masks,
        "output_token_sampling_logprobs": logprobs,
        "output_token_sampling_mask_length": len(masks),
    }


def hidden_states(sample: Sample, *, last: bool) -> list[Any]:
    """Entry 0 is the prompt's block (its last row produced token 0), then one row for each further token."""
    if last:
        rows = sample.hidden or sample.prompt_hidden
        return rows[-1] if rows else []
    return [sample.prompt_hidden, *sample.hidden[1:]]


# ---- streaming ---------------------------------------------------------------------------------------


async def _events(server: Server, body: GenerateBody, arrival: Arrival) -> AsyncGenerator[bytes, None]:
    """The route has answered 200 before anything is known: errors are events, too."""
    try:
        job = await _parse(body, server)
        generation = server.generation(job.prompts, NATIVE_NAMES, arrival)
        pieces = Pieces(server, job, generation.samples)
        async for arrived in generation.arrivals(job.interval):
            events = [pieces.event(sample, generation.take(sample, output)) for sample, output in arrived]
            if not generation.pending:
                events.append(DONE)
            yield b"".join(events)
    except SchemaError:
        raise
    except ApiError as error:
        yield sse(native_event(error)) + DONE


class Grown:
    """What the cumulative events of one sample repeat, as JSON: every entry is written once and copied from then on.

    The bytes sent grow with the square of the answer, as clients of this API expect; the work does not.
    """

    def __init__(self) -> None:
        self.prompt_lists: dict[str, Any] = {}
        self._written: dict[str, bytearray] = {}
        self._lengths: dict[str, int] = {}

    def prompt(self, event: dict[str, Any]) -> None:
        """Keeps the prompt's lists, once they are there: they stay what they are."""
        meta = event["meta_info"]
        if meta.get(PROMPT_LISTS[0]) and not self.prompt_lists:
            self.prompt_lists = {name: msgspec.Raw(to_json(meta[name])) for name in PROMPT_LISTS if name in meta}

    def output(self, event: dict[str, Any]) -> None:
        """Puts all entries so far in the place of the newest, in the lists of the event that grow."""
        meta = event["meta_info"]
        for name in LENGTHS:
            if name in meta:
                meta[name] = self._lengths[name] = self._lengths.get(name, 0) + meta[name]
        for holder, names in ((event, ("output_ids",)), (meta, OUTPUT_LISTS)):
            for name in names:
                if name in holder:
                    holder[name] = self._all(name, to_json(holder[name]))

    def _all(self, name: str, newest: bytes) -> msgspec.Raw:
        written = self._written.setdefault(name, bytearray(b"["))
        if len(newest) > 2:
            written += newest[1:-1] if len(written) == 1 else b"," + newest[1:-1]
        return msgspec.Raw(bytes(written) + b"]")


PROMPT_LISTS = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")
OUTPUT_LISTS = (
    "output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs", "token_sources",
    "output_token_sampling_mask", "output_token_sampling_logprobs",
)  # fmt: skip
LENGTHS = ("output_token_logprobs_length", "output_token_sampling_mask_length")


class Pieces:
    """The events of a stream."""

    def __init__(self, server: Server, job: Job, samples: Sequence[Sample]) -> None:
        self.server = server
        self.job = job
        self.many = len(samples) > 1 or not job.single
        wanted = job.body.incremental_stream
        self.incremental = server.options.incremental_streaming_output if wanted is None else wanted
        self.index = {sample: number for number, sample in enumerate(samples)}
        self.grown = {sample: Grown() for sample in samples}

    def event(self, sample: Sample, delta: Delta) -> bytes:
        """The event that tells of `delta`; called once for each, in order."""
        grown = self.grown[sample]
        event = answer(self.server, self.job, sample, Part(delta.first_token, delta.text, grown.prompt_lists))
        grown.prompt(event)
        if not self.incremental:
            event["text"] = sample.text
            grown.output(event)
        return sse(event | {"index": self.index[sample]} if self.many else event)
