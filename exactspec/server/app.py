"""The HTTP application: routes, the gate in front of them, and the shapes of errors."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from exactspec.server import control, page, protocol
from exactspec.server.chat import chat_completions
from exactspec.server.completions import completions
from exactspec.server.errors import ApiError, native_body, openai_body, schema_body
from exactspec.server.native import generate
from exactspec.server.state import GONE, Server, json_response

log = logging.getLogger("exactspec.server")

OPEN_PATHS = ("/health", "/health_generate", "/ready", "/ping", "/metrics", "/", "/page.js", "/page.css")
MODEL_ID = {"parameters": [{"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}]}
Handler = Callable[[Request], Awaitable[Response]]

ROUTES: list[tuple[str, list[str], Handler, type[protocol.Body] | None]] = [
    ("/generate", ["POST", "PUT"], generate, protocol.GenerateBody),
    ("/v1/completions", ["POST"], completions, protocol.CompletionBody),
    ("/v1/chat/completions", ["POST"], chat_completions, protocol.ChatBody),
    ("/v1/models", ["GET"], control.models, None),
    ("/health", ["GET"], control.health, None),
    ("/health_generate", ["GET"], control.health, None),
    ("/ready", ["GET"], control.ready, None),
    ("/ping", ["GET"], control.ready, None),
    ("/server_info", ["GET"], control.server_info, None),
    ("/get_server_info", ["GET"], control.server_info, None),
    ("/model_info", ["GET"], control.model_info, None),
    ("/get_model_info", ["GET"], control.model_info, None),
    ("/flush_cache", ["GET", "POST"], control.flush_cache, None),
    ("/abort_request", ["POST"], control.abort_request, protocol.AbortBody),
    ("/pause_generation", ["POST"], control.pause_generation, protocol.PauseBody),
    ("/continue_generation", ["POST"], control.continue_generation, protocol.Body),
    ("/tokenize", ["POST"], control.tokenize, protocol.TokenizeBody),
    ("/v1/tokenize", ["POST"], control.tokenize, protocol.TokenizeBody),
    ("/detokenize", ["POST"], control.detokenize, protocol.DetokenizeBody),
    ("/v1/detokenize", ["POST"], control.detokenize, protocol.DetokenizeBody),
    ("/v1/loads", ["GET"], control.loads, None),
    ("/metrics", ["GET"], control.metrics, None),
    ("/start_profile", ["GET", "POST"], control.unsupported, None),
    ("/stop_profile", ["GET", "POST"], control.unsupported, None),
    ("/open_session", ["GET", "POST"], control.unsupported, None),
    ("/close_session", ["GET", "POST"], control.unsupported, None),
]


def make_app(server: Server) -> ASGIApp:
    """The ASGI application of one server."""
    import exactspec

    app = FastAPI(title="ExactSpec", version=exactspec.__version__, docs_url=None, redoc_url=None)
    app.state.server = server
    for path, methods, handler, body in ROUTES:
        for method in methods:
            _add(app, path, method, handler, body if method != "GET" else None)
    _add(app, "/v1/models/{model_id:path}", "GET", control.model, None, MODEL_ID)
    for path in ("/", "/page.js", "/page.css"):
        app.add_api_route(path, page.page, methods=["GET", "HEAD"], include_in_schema=False)
    app.openapi()["components"] = {"schemas": protocol.schema_parts()}  # built once and kept
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    if server.options.allow_origin:
        return CORSMiddleware(
            Gate(app, server), allow_origins=[server.options.allow_origin], allow_methods=["*"], allow_headers=["*"]
        )
    return Gate(app, server)


def _add(
    app: FastAPI,
    path: str,
    method: str,
    handler: Handler,
    body: type[protocol.Body] | None,
    extra: dict[str, Any] | None = None,
) -> None:
    async def route(request: Request) -> Response:
        return await handler(request)

    route.__doc__ = handler.__doc__
    name = f"{method.lower()}{path.replace('/', '_').replace('{', '').replace('}', '').replace(':', '_')}"
    app.add_api_route(
        path, route, methods=[method], operation_id=name, response_model=None, response_class=Response,
        openapi_extra=protocol.schema_of(body) if body is not None else extra,
    )  # fmt: skip


def error_response(path: str, error: ApiError) -> Response:
    if isinstance(error, protocol.SchemaError):
        body: Any = schema_body(error.message)
    elif path.startswith("/v1/"):
        body = openai_body(error)
    else:
        body = native_body(error)
    return json_response(body, error.status, error.headers)


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    if error.status != GONE:
        request.app.state.server.metrics.errors.labels(str(error.status)).inc()
    return error_response(request.scope["path"], error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = error_response(request.url.path, ApiError(error.status_code, str(error.detail)))
    response.headers.update(error.headers or {})  # a 405 says which methods are allowed
    return response


class Gate:
    """In front of everything: keys, body sizes, the count of requests in flight, and errors nobody expected.

    It calls the handlers of fixed routes itself: an answer that streams does not pass through the framework's layers
    with every event. The framework has the rest, and describes them all.
    """

    def __init__(self, app: FastAPI, server: Server) -> None:
        self.app = app
        self.server = server
        self.handlers = {(path, method): handler for path, methods, handler, _ in ROUTES for method in methods}
        self.handlers |= {(path, "HEAD"): handler for path, methods, handler, _ in ROUTES if methods == ["GET"]}
        self.paths = {path for path, *_ in ROUTES}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"]
        refusal = self._refusal(scope, path)
        if refusal is not None:
            await error_response(path, refusal)(scope, receive, send)
            return
        await self._pass_on(scope, path, receive, send)

    def _refusal(self, scope: Scope, path: str) -> ApiError | None:
        headers = dict(scope["headers"])
        key = self.server.options.api_key
        if key and path not in OPEN_PATHS:
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), key.encode()):
                return ApiError(401, "Unauthorized: send the API key as a bearer token")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit():
            return ApiError(400, "Content-Length: is not a number")
        return self._too_large(int(length))

    def _too_large(self, size: int) -> ApiError | None:
        limit = self.server.options.max_body_mb * 2**20
        return ApiError(413, f"body: more than {limit} bytes") if limit and size > limit else None

    async def _pass_on(self, scope: Scope, path: str, receive: Receive, send: Send) -> None:
        received, started, status = 0, False, 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            too_large = self._too_large(received)
            if too_large is not None:
                raise too_large
            return message

        async def noted(message: Message) -> None:
            nonlocal started, status
            if message["type"] == "http.response.start":
                started, status = True, message["status"]
            await send(message)

        self.server.in_flight += 1
        try:
            handler = self.handlers.get((path, scope["method"]))
            if handler is None:
                await self.app(scope, counted, noted)
            else:
                response = await self._response(handler, scope, counted)
                started, status = True, response.status_code
                await response(scope, counted, send)
        except Exception:
            log.exception("%s failed", path)
            if started:
                raise
            status = 500
            self.server.metrics.errors.labels("500").inc()
            await error_response(path, ApiError(500, "internal error; the server's log has the details"))(
                scope, receive, send
            )
        finally:
            self.server.in_flight -= 1
            self.server.metrics.requests.labels(path if path in self.paths else "other", str(status)).inc()

    async def _response(self, handler: Handler, scope: Scope, receive: Receive) -> Response:
        scope["app"] = self.app
        request = Request(scope, receive)
        try:
            return await handler(request)
        except ApiError as error:
            return await _on_api_error(request, error)
        except ClientDisconnect:
            return await _on_api_error(request, ApiError(GONE, "the client has gone"))
