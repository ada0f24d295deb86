"""What clients rely on below the API: methods, connections that are used again, and clients that leave."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from conftest import Running


def exchange(server: Running, data: bytes, answers: int) -> list[bytes]:
    """Sends bytes over one connection and reads so many whole answers from it."""
    found: list[bytes] = []
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=20) as connection:
        connection.sendall(data)
        received = b""
        while len(found) < answers:
            piece = connection.recv(1 << 16)
            assert piece, f"the server hung up after {found} {received!r}"
            received += piece
            while (end := _end(received)) is not None:
                found.append(received[:end])
                received = received[end:]
    assert received == b""
    return found


def _end(data: bytes) -> int | None:
    """Where the first answer in `data` ends, if it does."""
    head = data.find(b"\r\n\r\n") + 4
    if head < 4:
        return None
    lines = dict(line.lower().split(b": ", 1) for line in data[: head - 4].split(b"\r\n")[1:])
    if b"content-length" in lines:
        end = head + int(lines[b"content-length"])
        return end if end <= len(data) else None
    end = data.find(b"\r\n0\r\n\r\n", head - 2)  # chunked
    return None if end < 0 else end + 7


def post(path: str, body: object) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def test_one_connection_carries_streams_errors_and_answers_in_order(server: Running) -> None:
    """Sent at once, answered one after the other; a refused body does not spoil what comes behind it."""
    requests = [
        post("/v1/completions", {"prompt": "SAY:one", "stream": True}),
        post("/generate", {"text": "SAY:two"}),
        post("/generate", b'{"text": '),
        post("/generate", {"text": "x" * 1_100_000}),  # more than --max-body-mb
        post("/v1/chat/completions", {"messages": [{"role": "user", "content": "SAY:three"}], "stream": True}),
        post("/generate", {"text": "SAY:four", "stream": True}),
    ]
    answers = exchange(server, b"".join(requests), len(requests))
    assert [int(answer.split()[1]) for answer in answers] == [200, 200, 400, 413, 200, 200]
    for answer, word in zip(answers, (b"ne", b"two", b"JSON", b"bytes", b"hre", b"our"), strict=True):
        assert word in answer
    assert [answer.count(b"data: [DONE]") for answer in answers] == [1, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/health", "/nothing"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_of_http_1_0_reads_until_the_connection_ends(server: Running, path: str, stream: bool) -> None:
    """It knows no chunks: a stream comes as it is, and its end is the connection's."""
    bodies = {"/generate": {"text": "SAY:the end"}, "/v1/completions": {"prompt": "SAY:the end"}}
    data = json.dumps(bodies[path] | {"stream": stream}).encode() if path in bodies else b""
    head = f"{'POST' if data else 'GET'} {path} HTTP/1.0\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=20) as connection:
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        received = b""
        while piece := connection.recv(1 << 16):
            received += piece
    fields, _, content = received.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in fields.lower()
    assert b"connection: close" in fields.lower()
    if not data:
        assert (content == b"") == (path == "/health")
    elif stream:
        events = content.decode().split("\n\n")
        assert all(event.startswith("data: {") for event in events[:-2])
        assert events[-2:] == ["data: [DONE]", ""]
    else:
        assert "the end" in str(json.loads(content))


def test_methods(server: Running) -> None:
    for path in ("/health", "/v1/models", "/server_info", "/metrics", "/"):
        head = server.http.head(path)
        assert (head.status_code, head.content) == (200, b"")
    for path, allowed in (("/v1/completions", "POST"), ("/health", "GET"), ("/tokenize", "POST")):
        refused = server.http.delete(path)
        assert (refused.status_code, refused.headers["allow"]) == (405, allowed)


def test_who_leaves_before_the_first_token_is_not_waited_for(server: Running) -> None:
    """In a pause nothing is computed; a client that hangs up meanwhile leaves nothing behind."""
    bodies = [
        ("/generate", {"text": "abc", "sampling_params": {"max_new_tokens": 3000}}),
        ("/v1/completions", {"prompt": "abc", "max_tokens": 3000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 3000}),
    ]
    assert server.post("/pause_generation", {"mode": "in_place"}).status_code == 200
    try:
        with ThreadPoolExecutor(6) as pool:
            leavers = [
                pool.submit(_leave, server.url + path, {**body, "stream": stream})
                for path, body in bodies
                for stream in (False, True)
            ]
            assert all(leaver.result() for leaver in leavers)
        time.sleep(0.7)
        state = server.http.get("/server_info").json()["internal_states"][0]
        assert (state["num_running"], state["num_waiting"]) == (0, 0)
    finally:
        server.post("/continue_generation", {})
    assert server.post("/generate", {"text": "SAY:on"}).json()["text"] == "on"


def _leave(url: str, body: object) -> bool:
    try:
        with httpx.stream("POST", url, json=body, timeout=0.6) as response:
            response.read()
    except httpx.ReadTimeout:
        return True
    return False


def test_the_cache_is_flushed_by_many_at_once(server: Running) -> None:
    """Each gets a true answer: 200, or 400 while others' requests run."""
    seen: list[int] = []

    def send(number: int) -> None:
        path = "/flush_cache" if number % 2 else "/generate"
        seen.append(httpx.post(server.url + path, json={"text": "SAY:abc"}, timeout=20).status_code)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 24
    assert set(seen) <= {200, 400}
    assert server.http.post("/flush_cache?timeout=5").status_code == 200
