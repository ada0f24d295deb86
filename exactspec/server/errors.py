"""Errors on their way to HTTP: which status, and the body shape of the API that was called."""

from __future__ import annotations

import re
from typing import Any

from exactspec.errors import RequestError

# names of the engine's fields in the bodies of each API
NATIVE_NAMES = {
    "prompt": "input_ids",
    "prompt_logprob_start": "logprob_start_len",
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num",
    "logprob_token_ids": "token_ids_logprob",
    "seed": "sampling_seed",
    "sampling_mask": "return_sampling_mask",
    "request_id": "rid",
}
OPENAI_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "request_id": "rid"}


class ApiError(Exception):
    """An answer other than 200. `bare` is the native route's refusal of the body itself."""

    def __init__(self, status: int, message: str, *, retry_after: int | None = None, bare: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.retry_after = retry_after
        self.bare = bare

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


def bad_request(field: str, reason: str) -> ApiError:
    return ApiError(400, f"{field}: {reason}")


def from_request_error(error: RequestError, names: dict[str, str]) -> ApiError:
    """The engine's refusal in the words of the API that was called."""
    reason = error.reason
    for ours, theirs in names.items():
        if "_" in ours:  # a word that says nothing else
            reason = re.sub(rf"\b{ours}\b", theirs, reason)
    return bad_request(names.get(error.field, error.field), reason)


def native_body(error: ApiError) -> dict[str, Any]:
    if error.status == 503:  # the same object as on the OpenAI routes
        return {"object": "error", "message": error.message, "type": "503", "param": None, "code": 503}
    return {"error": error.message} if error.bare else {"error": {"message": error.message}}


def native_event(error: ApiError) -> dict[str, Any]:
    """The error as an event of a native stream."""
    kind = "BadRequestError" if error.status < 500 else "ServiceUnavailable"
    retryable = error.status in (429, 503)
    return {"error": {"message": error.message, "type": kind, "code": error.status, "retryable": retryable}}


def openai_body(error: ApiError) -> dict[str, Any]:
    kinds = {
        401: "AuthenticationError",
        404: "NotFoundError",
        413: "RequestTooLarge",
        429: "RateLimitError",
        503: "503",
    }
    kind = kinds.get(error.status, "BadRequestError" if error.status < 500 else "InternalServerError")
    return {"object": "error", "message": error.message, "type": kind, "param": None, "code": error.status}


def schema_body(message: str) -> dict[str, Any]:
    """Any route: the body is no JSON, a key has the wrong type, or a required one is missing."""
    return {"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400}
