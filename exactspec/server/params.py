"""Sampling parameters of both APIs to SamplingParams. Every refusal names the field as the client wrote it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from exactspec.errors import RequestError
from exactspec.grammar import check_grammar
from exactspec.server.errors import NATIVE_NAMES, OPENAI_NAMES, ApiError, bad_request, from_request_error
from exactspec.server.options import ServeOptions
from exactspec.text.stops import check_stops
from exactspec.types import SamplingParams

JSON_OBJECT = '{"type": "object"}'

# native names that are SamplingParams fields as they stand
NATIVE_FIELDS = (
    "max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "stop", "stop_regex", "stop_token_ids", "ignore_eos",
    "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "n", "json_schema", "regex", "ebnf",
    "logit_bias",
)  # fmt: skip
UNSUPPORTED = ("structural_tag", "beam_width", "custom_params", "watermark", "choice")
MOST_DIGITS = 10  # of a token id
SWITCHES = ("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim")


@dataclass(frozen=True, slots=True)
class LogprobPlan:
    """Which logprobs a request asked for, in SamplingParams' terms."""

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_start: int = 0
    token_ids: tuple[int, ...] = ()
    kind: str = "raw"


def build(values: Mapping[str, Any], plan: LogprobPlan, names: dict[str, str], options: ServeOptions) -> SamplingParams:
    """Checks everything that needs no model. Raises ApiError (400) naming the field in the caller's words."""
    try:
        params = SamplingParams(
            **values,
            logprobs=plan.logprobs,
            logprobs_kind=plan.kind,  # type: ignore[arg-type]
            logprob_token_ids=plan.token_ids,
            prompt_logprobs=plan.prompt_logprobs,
            prompt_logprob_start=plan.prompt_start,
        )
        check_stops(params)
        check_grammar(params)
    except RequestError as error:
        raise from_request_error(error, names) from None
    _check_limits(params, names, options)
    return params


def _check_limits(params: SamplingParams, names: dict[str, str], options: ServeOptions) -> None:
    counts = (
        ("n", params.n, options.max_n),
        ("logit_bias", len(params.logit_bias or {}), options.max_logit_bias),
        ("stop_token_ids", len(params.stop_token_ids or ()), options.max_logit_bias),
        ("logprobs", params.logprobs or 0, options.max_logprobs),
        ("prompt_logprobs", params.prompt_logprobs or 0, options.max_logprobs),
        ("logprob_token_ids", len(params.logprob_token_ids or ()), options.max_logprobs),
    )
    for field, count, limit in counts:
        if count > limit:
            raise bad_request(names.get(field, field), f"at most {limit} allowed here, got {count}")


# ---- native ------------------------------------------------------------------------------------------


def native_params(body: Mapping[str, Any], plan: LogprobPlan, options: ServeOptions) -> SamplingParams:
    """The `sampling_params` object of /generate."""
    known = {*NATIVE_FIELDS, *UNSUPPORTED, "sampling_seed", "stream_interval"}
    unknown = sorted(set(body) - known)
    if unknown:
        raise ApiError(400, f"Unexpected keyword argument '{unknown[0]}' in sampling_params", bare=True)
    _refuse_unsupported(body)
    values = {name: body[name] for name in NATIVE_FIELDS if body.get(name) is not None}
    if "max_new_tokens" in body and body["max_new_tokens"] is None:
        values["max_new_tokens"] = None
    if body.get("sampling_seed") is not None:
        values["seed"] = body["sampling_seed"]
    _tidy(values)
    return build(values, plan, NATIVE_NAMES, options)


def _refuse_unsupported(body: Mapping[str, Any]) -> None:
    for name in UNSUPPORTED:
        if body.get(name) not in (None, "", {}, [], False) and not (name == "beam_width" and body[name] == 1):
            raise bad_request(name, "is not supported")


def _tidy(values: dict[str, Any]) -> None:
    """In place: JSON spellings to Python ones; types that SamplingParams does not look at itself."""
    if values.get("logit_bias") is not None:
        values["logit_bias"] = _logit_bias(values["logit_bias"])
    for name in SWITCHES:
        if name in values and not isinstance(values[name], bool):
            raise bad_request(name, f"must be true or false, got {values[name]!r}")
    for name in ("stop", "stop_regex"):
        value = values.get(name)
        if isinstance(value, str):
            value = [value] if value else []
        if value is not None and (not isinstance(value, list) or not all(isinstance(s, str) for s in value)):
            raise bad_request(name, "must be a string or a list of strings")
        if value is not None:
            values[name] = [text for text in value if text]
    ids = values.get("stop_token_ids")
    if ids is not None and not isinstance(ids, list):
        raise bad_request("stop_token_ids", "must be a list of token ids")
    if ids is not None:  # ids that no vocabulary has can never come: tolerated, and dropped
        values["stop_token_ids"] = [i for i in ids if not isinstance(i, int) or isinstance(i, bool) or 0 <= i < 2**31]
    for name in ("json_schema", "regex", "ebnf"):
        if name in values and not isinstance(values[name], str):
            raise bad_request(name, "must be a string")
        if name in values and not values[name]:
            del values[name]


def _logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise bad_request("logit_bias", "must be an object from token ids to numbers")
    bias: dict[int, float] = {}
    for key, number in value.items():
        if not (str(key).isdecimal() and str(key).isascii() and len(str(key)) <= MOST_DIGITS):
            raise bad_request("logit_bias", f"{key!r:.40} is not a token id")
        bias[int(key)] = number
    return bias


# ---- OpenAI ------------------------------------------------------------------------------------------

OPENAI_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "n", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "stop", "stop_regex", "stop_token_ids", "no_stop_trim", "ignore_eos", "skip_special_tokens", "regex", "ebnf",
    "json_schema", "logit_bias", "seed",
)  # fmt: skip


def openai_params(
    body: Mapping[str, Any],
    max_tokens: int | None,
    defaults: Mapping[str, Any],
    plan: LogprobPlan,
    options: ServeOptions,
) -> SamplingParams:
    """Body fields of either OpenAI route. `defaults` fills sampling fields that the body leaves out."""
    values = {name: value for name, value in defaults.items() if name in OPENAI_FIELDS and value is not None}
    values |= {name: body[name] for name in OPENAI_FIELDS if body.get(name) is not None}
    values["max_new_tokens"] = max_tokens
    if body.get("min_tokens") is not None:
        values["min_new_tokens"] = body["min_tokens"]
    schema = response_format_schema(body.get("response_format"))
    if schema is not None:
        if body.get("json_schema"):
            raise bad_request("json_schema", "cannot be combined with response_format")
        values["json_schema"] = schema
    _tidy(values)
    return build(values, plan, OPENAI_NAMES, options)


def response_format_schema(value: Any) -> str | None:
    """response_format as a JSON schema document; None when the text is free."""
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return JSON_OBJECT
    if kind != "json_schema":
        raise bad_request("response_format", f"type {kind!r} is not supported; use text, json_object or json_schema")
    inner = value.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if schema is None:
        raise bad_request("response_format", "json_schema.schema is missing")
    if inner.get("strict") is not None and not isinstance(inner["strict"], bool):
        raise bad_request("response_format", "json_schema.strict must be true or false")
    if not isinstance(schema, Mapping | bool):
        raise bad_request("response_format", "json_schema.schema must be an object")
    return json.dumps(schema)
