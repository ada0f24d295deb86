"""Everything that is not generation: health, information, cache, aborts, pauses, the tokenizer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from exactspec.errors import RequestError
from exactspec.server import messages as m
from exactspec.server.chat import _message
from exactspec.server.errors import OPENAI_NAMES, ApiError, bad_request, from_request_error, native_body
from exactspec.server.mailbox import Mailbox
from exactspec.server.protocol import AbortBody, Body, DetokenizeBody, PauseBody, TokenizeBody, parse_body
from exactspec.server.state import Server, json_response, server_of
from exactspec.types import Request as EngineRequest
from exactspec.types import SamplingParams

HEALTH_TIMEOUT_S = 20.0
STATS_TIMEOUT_S = 1.0
BLOCK_SIZES = {"dflash": 1, "dspark": 0}  # rows of a draft block beyond gamma, in the words of this API
_probes = itertools.count(1)


# ---- health ------------------------------------------------------------------------------------------


async def health(request: Request) -> Response:
    """200 when a token has come through the engine (or others' tokens keep coming); 503 otherwise."""
    server = server_of(request)
    try:
        server.check_available()
        if server.client.paused:
            await server.client.call("ping", timeout=HEALTH_TIMEOUT_S)
        else:
            await _one_token(server)
    except (ApiError, TimeoutError):
        return Response(status_code=503)
    return Response(status_code=200)


async def _one_token(server: Server) -> None:
    client, started = server.client, time.monotonic()
    params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    token = min(1, int(client.info["vocab_size"]) - 1)
    probe = EngineRequest(f"health-{next(_probes)}", (token,), params, 0, priority=1 << 30, cache_namespace="health")
    mailbox: Mailbox[Any] = Mailbox()
    client.submit(probe, mailbox)
    try:
        while time.monotonic() - started < HEALTH_TIMEOUT_S:
            try:
                _, event = (await asyncio.wait_for(mailbox.get_all(), 0.25))[0]
            except TimeoutError:
                if client.last_output_at > started:
                    return  # busy, and moving
                continue
            if isinstance(event, ApiError):
                raise event
            if isinstance(event, m.Refused):
                raise ApiError(503, event.reason)
            return
        raise TimeoutError
    finally:
        client.abort([probe.request_id], silent=True)


async def ready(request: Request) -> Response:
    server = server_of(request)
    try:
        server.check_available()
    except ApiError:
        return Response(status_code=503)
    return Response(status_code=200)


# ---- information -------------------------------------------------------------------------------------


def _version() -> str:
    import exactspec

    return exactspec.__version__


async def _refresh(server: Server) -> None:
    """Has an idle engine send its counts, so that they include every answer that has been given. A busy one sends them
    after steps anyway, and is not waited for."""
    if server.client.active():
        return
    with contextlib.suppress(ApiError):
        await server.client.call("stats", timeout=STATS_TIMEOUT_S)


async def server_info(request: Request) -> Response:
    """The start options in snake case, and the live state."""
    server = server_of(request)
    await _refresh(server)
    options, info, stats = server.options, server.client.info, server.client.stats
    gamma = info.get("gamma") or 0
    pool = (info.get("limits") or {}).get("pool_tokens") or 0
    state: dict[str, Any] = {
        "last_gen_throughput": server.client.throughput,
        "effective_max_running_requests_per_dp": options.max_running_requests,
        "num_running": stats.get("num_running", 0),
        "num_waiting": stats.get("num_waiting", 0),
        "num_pages": stats.get("num_pages", 0),
        "free_pages": stats.get("free_pages", 0),
        "cached_pages": stats.get("cached_pages", 0),
    }
    if options.counts_rounds and stats.get("accept_length") is not None:
        state["avg_spec_accept_length"] = stats["accept_length"]
    shown = {k: v for k, v in asdict(options).items() if k not in ("api_key", "factory", "tokenizer_factory")}
    shown |= {
        "served_model_name": options.model_name,
        "tokenizer_path": options.model_path,
        "speculative_algorithm": options.algorithm if gamma else None,
        "speculative_draft_model_path": options.speculative_draft_model_path or (options.draft_name if gamma else None),
        "speculative_num_draft_tokens": gamma + 1 if gamma else None,
        "speculative_num_steps": 1 if gamma else None,
        "speculative_eagle_topk": 1 if gamma else None,
        **{
            f"speculative_{name}_block_size": gamma + more if gamma and options.algorithm == name.upper() else None
            for name, more in BLOCK_SIZES.items()
        },
        "dtype": info.get("dtype", options.dtype),
        "device": info.get("device", options.device),
        "context_length": info.get("context_length"),
        "page_size": info.get("page_size", options.page_size),
        "max_total_num_tokens": pool,
        "max_req_input_len": max(0, (info.get("context_length") or 0) - 1),
        "internal_states": [state],
        "status": server.client.status,
        "num_restarts": server.client.num_restarts,
        "version": _version(),
    }
    return json_response(shown)


async def model_info(request: Request) -> Response:
    server = server_of(request)
    options, info = server.options, server.client.info
    return json_response(
        {
            "model_path": options.model_path,
            "served_model_name": options.model_name,
            "tokenizer_path": options.model_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": "default",
            "load_format": "auto",
            "reasoning_parser": None,
            "tool_call_parser": None,
            "disaggregation_mode": "null",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": info.get("architecture"),
            "architectures": [info["architecture"]] if info else [],
        }
    )


def _card(server: Server) -> dict[str, Any]:
    name = server.options.model_name
    return {
        "id": name,
        "object": "model",
        "created": int(server.started),
        "owned_by": "sglang",  # what clients of this API expect to read
        "root": name,
        "parent": None,
        "max_model_len": server.client.info.get("context_length"),
    }


async def models(request: Request) -> Response:
    return json_response({"object": "list", "data": [_card(server_of(request))]})


async def model(request: Request) -> Response:
    server = server_of(request)
    asked = request.path_params["model_id"]
    if asked == server.options.model_name:
        return json_response(_card(server))
    error = {
        "message": f"The model {asked!r} does not exist",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
    return json_response({"error": error}, 404)


async def loads(request: Request) -> Response:
    server = server_of(request)
    await _refresh(server)
    stats = server.client.stats
    running, waiting = stats.get("num_running", 0), stats.get("num_waiting", 0)
    used = (stats.get("num_pages", 0) - stats.get("free_pages", 0)) * server.client.info.get("page_size", 1)
    return json_response(
        {"loads": [{"dp_rank": 0, "num_reqs": running + waiting, "num_waiting_reqs": waiting, "num_tokens": used}]}
    )


async def metrics(request: Request) -> Response:
    await _refresh(server_of(request))
    return Response(server_of(request).metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


# ---- control -----------------------------------------------------------------------------------------


async def flush_cache(request: Request) -> Response:
    server = server_of(request)
    text = request.query_params.get("timeout") or "0"
    try:
        seconds = float(text)
        if not 0 <= seconds <= 3600:
            raise ValueError
    except ValueError:
        raise bad_request("timeout", f"must be seconds between 0 and 3600, got {text!r}") from None
    if await server.client.call("flush", seconds):
        return PlainTextResponse("Cache flushed.\n")
    return PlainTextResponse("Cache not flushed: requests are running or waiting.\n", 400)


async def abort_request(request: Request) -> Response:
    server = server_of(request)
    body = parse_body(AbortBody, await request.body())
    prefix = body.rid or ""
    if body.abort_all or prefix:
        server.abort("" if body.abort_all else prefix)
    return Response(status_code=200)


async def pause_generation(request: Request) -> Response:
    server = server_of(request)
    mode = parse_body(PauseBody, await request.body()).mode or "abort"
    if mode not in ("abort", "retract", "in_place"):
        raise bad_request("mode", f"must be abort, retract or in_place, got {mode!r}")
    if mode == "abort":
        server.abort("")
    await server.client.call({"in_place": "pause", "abort": "pause_abort", "retract": "pause_retract"}[mode])
    server.client.paused = True
    return json_response({"message": f"generation is paused ({mode})", "status": "ok"})


async def continue_generation(request: Request) -> Response:
    server = server_of(request)
    parse_body(Body, await request.body())
    await server.client.call("resume")
    server.client.paused = False
    return json_response({"message": "generation goes on", "status": "ok"})


async def unsupported(request: Request) -> Response:
    name = request.url.path.strip("/")
    return json_response(native_body(ApiError(400, f"{name}: is not supported")), 400)


# ---- tokenizer ---------------------------------------------------------------------------------------


async def tokenize(request: Request) -> Response:
    server = server_of(request)
    body = parse_body(TokenizeBody, await request.body())
    server.check_available()
    if body.messages is not None:
        try:
            messages = [_message(number, message) for number, message in enumerate(body.messages)]
            server.check_size("messages", sum(len(message["content"]) for message in messages))
            tokens: Any = await server.chat_ids(messages, True)
        except RequestError as error:
            raise from_request_error(error, OPENAI_NAMES) from None
        count: Any = len(tokens)
    elif body.prompt is None:
        raise bad_request("prompt", "either prompt or messages is needed")
    else:
        special = body.add_special_tokens is not False
        prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        lists = [await server.encode(prompt, special) for prompt in prompts]
        tokens = lists[0] if isinstance(body.prompt, str) else lists
        count = len(tokens) if isinstance(body.prompt, str) else [len(ids) for ids in lists]
    limit = server.client.info.get("context_length")
    return json_response({"tokens": tokens, "count": count, "max_model_len": limit})


async def detokenize(request: Request) -> Response:
    server = server_of(request)
    body = parse_body(DetokenizeBody, await request.body())
    server.check_available()
    many = bool(body.tokens) and isinstance(body.tokens[0], list)
    texts = []
    for ids in body.tokens if many else [body.tokens]:
        bad = next((i for i in ids if not 0 <= i < server.tokenizer.vocab_size), None)  # type: ignore[union-attr, operator]
        if bad is not None:
            raise bad_request("tokens", f"{bad} is outside the vocabulary (0..{server.tokenizer.vocab_size - 1})")
        texts.append(server.tokenizer.decode(ids, skip_special_tokens=body.skip_special_tokens is not False))
    return json_response({"text": texts if many else texts[0]})
