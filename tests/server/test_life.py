"""Start, stop, keys, and an engine process that dies."""

from __future__ import annotations

import json
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from conftest import running_server

from exactspec.errors import ConfigError
from exactspec.server.launch import serve
from exactspec.server.options import parse


def test_an_engine_that_dies_takes_only_its_requests_with_it() -> None:
    with running_server("--max-restarts", "1", model="slow") as server, ThreadPoolExecutor(4) as pool:
        flight = pool.submit(server.post, "/generate", {"text": "abc", "sampling_params": {"max_new_tokens": 3000}})
        stream = pool.submit(_stream, server.url)
        time.sleep(0.3)
        lost = server.post("/generate", {"text": "DIE"})
        assert lost.status_code == flight.result().status_code == 503
        assert "lost" in lost.json()["message"]
        assert json.loads(stream.result()[-2].removeprefix("data: "))["error"]["code"] == 503
        assert server.http.get("/health").status_code == 503
        server.wait()
        assert server.post("/generate", {"text": "SAY:again"}).json()["text"] == "again"
        assert server.http.get("/server_info").json()["num_restarts"] == 1
        server.post("/generate", {"text": "DIE"})  # the second time is the last
        time.sleep(0.5)
        assert server.http.get("/health").status_code == 503
        refused = server.post("/v1/completions", {"prompt": "a"})
        assert refused.status_code == 503
        assert refused.json()["type"] == "503"
        assert "Retry-After" not in refused.headers


def _stream(url: str) -> list[str]:
    body = {"text": "abc", "stream": True, "sampling_params": {"max_new_tokens": 3000}}
    with httpx.stream("POST", url + "/generate", json=body, timeout=30) as response:
        return [line for line in response.iter_lines() if line]


def test_sigterm_drains() -> None:
    with running_server(model="slow") as server, ThreadPoolExecutor(2) as pool:
        body = {"text": "abc", "sampling_params": {"max_new_tokens": 300}}
        flight = pool.submit(server.post, "/generate", body)
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        late = server.post("/generate", body)
        assert late.status_code == 503
        assert late.headers["Retry-After"]
        assert server.http.get("/health").status_code == 503
        assert flight.result().json()["meta_info"]["completion_tokens"] == 300
        assert server.process.wait(10) == 0


def test_the_engine_ends_with_the_server() -> None:
    with running_server() as server:
        engine = _children(server.process.pid)
        assert engine
        server.process.kill()
        server.process.wait()
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and any(_alive(pid) for pid in engine):
            time.sleep(0.1)
        assert not any(_alive(pid) for pid in engine)


def _children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return [int(child) for child in file.read().split()]


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().split()[2] != "Z"
    except OSError:
        return False


def test_what_cannot_start_says_why_and_ends(capfd: pytest.CaptureFixture[str]) -> None:
    """Wrong settings are not tried again: one line, status 2."""
    with running_server(model="broken", wait=False) as server:
        assert server.process.wait(60) == 2
    errors = [line for line in capfd.readouterr().err.splitlines() if "INFO" not in line]
    assert len(errors) == 1
    assert "cannot start: model: is broken" in errors[0]


def test_a_port_that_is_taken_is_told_before_anything_loads() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port: cannot listen on 127.0.0.1:{port}"):
            serve(parse(["model", "--port", str(port)]))
    with pytest.raises(ConfigError, match="port: must be from 0 to 65535"):
        parse(["model", "--port", "99999"])
    with pytest.raises(ConfigError, match="model_path: 'other' is given beside the model 'model'"):
        parse(["model", "--model-path", "other"])
    assert parse(["model", "--model-path", "model"]).model_path == "model"


def test_api_key() -> None:
    with running_server("--api-key", "secret", key="secret") as server:
        bare = httpx.Client(base_url=server.url)
        for headers in (
            {}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}, {"Authorization": "Basic secret"},
            {"Authorization": "Bearer secret more"}, {"Authorization": "Bearer"},
        ):  # fmt: skip
            for path in ("/generate", "/v1/completions", "/flush_cache", "/abort_request"):
                assert bare.post(path, json={"text": "SAY:a"}, headers=headers).status_code == 401
            assert bare.get("/server_info", headers=headers).status_code == 401
        for path in ("/health", "/health_generate", "/ready", "/metrics"):
            assert bare.get(path).status_code == 200
        assert server.post("/generate", {"text": "SAY:a"}).status_code == 200
        small = bare.post("/generate", json={"text": "SAY:a"}, headers={"Authorization": "bearer  secret"})
        assert small.status_code == 200  # the scheme's case says nothing


def test_any_key_will_do_without_one(server) -> None:  # type: ignore[no-untyped-def]
    assert server.post("/generate", {"text": "SAY:a"}, headers={"Authorization": "Bearer EMPTY"}).status_code == 200


def test_a_request_has_a_time_limit() -> None:
    with running_server("--request-timeout", "0.5", model="slow") as server:
        body = {"text": "abc", "sampling_params": {"max_new_tokens": 3000}}
        answer = server.post("/generate", body)
        assert answer.status_code == 503
        assert answer.json()["object"] == "error"
        lines = _stream(server.url)
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == 503


def test_incremental_streams() -> None:
    with running_server("--incremental-streaming-output", "--stream-interval", "4") as server:
        body = {"text": "SAY:abcdefghijkl", "stream": True, "return_logprob": True}
        with server.http.stream("POST", "/generate", json=body) as response:
            pieces = [json.loads(line[6:]) for line in response.iter_lines() if line and "[DONE]" not in line]
        assert "".join(piece["text"] for piece in pieces) == "abcdefghijkl"
        assert all(len(p["output_ids"]) == len(p["meta_info"]["output_token_logprobs"]) for p in pieces)
        assert sum(len(p["output_ids"]) for p in pieces) == 12
        assert all(len(p["output_ids"]) >= 4 for p in pieces[1:-1])


def test_an_sglang_launch_line_works_as_it_is() -> None:
    line = (
        "--model-path some/model --speculative-algorithm DSPARK --speculative-draft-model-path /d --dtype bfloat16 "
        "--speculative-num-draft-tokens 8 --mem-fraction-static 0.7 --trust-remote-code --attention-backend fa3 "
        "--host 0.0.0.0 --port 1234 --page-size 1 --max-running-requests 8 --chunked-prefill-size 128 --tp-size 1 "
        "--enable-return-hidden-states --disable-radix-cache --served-model-name name --max-total-tokens 2048"
    )
    options = parse(line.split())
    settings = options.engine_settings()
    assert settings["model"] == "some/model"
    assert (settings["draft"], settings["gamma"], options.algorithm) == ("/d", 7, "DSPARK")
    assert (settings["page_size"], settings["prefix_cache"], settings["kv_tokens"]) == (1, False, 2048)
    assert (options.model_name, options.host, options.port) == ("name", "0.0.0.0", 1234)
    assert parse(["m", "--speculative-algorithm", "NGRAM"]).engine_settings()["draft"] == "ngram"
    assert parse(["m"]).engine_settings()["draft"] is None
    assert parse(["m"]).host == "127.0.0.1"
    assert not parse(["m"]).counts_rounds
    for flags in (["--draft", "none"], ["--draft", "ngram"], ["--speculative-algorithm", "DFLASH"]):
        assert parse(["m", *flags]).counts_rounds
    assert parse(["m", "--draft", "none"]).engine_settings()["draft"] is None


def test_ranks_and_random_weights_reach_the_engine() -> None:
    for flag in ("--tp", "--tp-size", "--tensor-parallel-size"):
        assert parse(["m", flag, "2"]).engine_settings()["tensor_parallel"] == 2
    options = parse(["--random-weights", "qwen3-8b", "--draft", "random"])
    assert options.engine_settings()["model"] == "random:qwen3-8b"
    with pytest.raises(ConfigError, match="random_weights"):
        parse(["m", "--random-weights", "qwen3-8b"])


def test_options_that_contradict_are_refused_by_name() -> None:
    for argv, word in (
        (["m", "--dp-size", "2"], "dp-size"),
        ([], "model_path"),
        (["m", "--gamma", "3", "--speculative-num-draft-tokens", "4"], "gamma"),
        (["m", "--draft", "ngram", "--speculative-algorithm", "NGRAM"], "draft"),
        (["m", "--speculative-num-draft-tokens", "1"], "speculative_num_draft_tokens"),
        (["m", "--speculative-algorithm", "EAGLE"], "speculative_algorithm: must be one of DFLASH, .* got 'EAGLE'"),
        (["m", "--max-restarts", "-1"], "max_restarts"),
    ):
        with pytest.raises(ConfigError, match=word):
            parse(argv)


def test_engine_settings_are_what_the_engine_takes() -> None:
    from exactspec.engine.config import EngineConfig

    settings = parse(["m", "--draft", "ngram"]).engine_settings()
    assert EngineConfig(**settings).draft == "ngram"


def test_a_host_name_that_cannot_be_one_is_a_config_error() -> None:
    from exactspec.errors import ConfigError
    from exactspec.server.launch import _listen

    with pytest.raises(ConfigError, match="port: cannot listen on"):
        _listen("a" * 70 + ".x", 0)
