"""The page at `/` for people who look: three static files, served as they are."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).parent / "static"
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
}


@lru_cache(maxsize=8)
def _read(name: str) -> bytes:
    return (FOLDER / name).read_bytes()


async def page(request: Request) -> Response:
    name, kind = FILES[request.url.path]
    return Response(_read(name), media_type=kind, headers={"Cache-Control": "no-cache"})
