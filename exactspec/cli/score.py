"""`exactspec score`: a file of texts, or of prompts with choices, to prompt logprobs as JSON lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from exactspec.cli import options as opt
from exactspec.errors import ConfigError

if TYPE_CHECKING:
    from exactspec.engine.llm import LLM
    from exactspec.text.tokenizer import Tokenizer
    from exactspec.types import RequestOutput, SamplingParams

BATCH = 64


def score(
    model: opt.Model,
    file: Annotated[
        str,
        typer.Argument(
            help='JSON lines: {"text": ...} or {"prompt": ..., "choices": [...]}; plain lines are texts; - reads stdin.'
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="Write here instead of standard output.")] = None,
    top: Annotated[int, typer.Option(help="Also the k most likely tokens at each position.")] = 0,
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    numerics: opt.Numerics = "exact",
    context_length: opt.ContextLength = None,
    kv_tokens: opt.KvTokens = None,
) -> None:
    """Score texts, or choices after a prompt: one JSON line each.

    A text gets its token ids, their logprobs (nats; null for the first token), the sum and the perplexity; a record
    with choices the same for each choice after the prompt, and which is best.
    """
    from exactspec.engine.llm import LLM

    if top < 0:
        raise ConfigError(f"top: must not be negative, got {top}")
    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"out: {out.parent} is no folder")
    records = list(_read(file))
    llm = LLM(model, device=device, dtype=dtype, numerics=numerics, context_length=context_length, kv_tokens=kv_tokens)
    sink = open(out, "w", encoding="utf-8") if out is not None else sys.stdout  # noqa: SIM115 - closed below
    try:
        _score_all(llm, records, sink, top)
    finally:
        if out is not None:
            sink.close()


def _score_all(llm: LLM, records: list[dict[str, Any]], sink: IO[str], top: int) -> None:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("scoring", total=len(records))
        for start in range(0, len(records), BATCH):
            group = records[start : start + BATCH]
            jobs = [job for record in group for job in _jobs(llm.tokenizer, record)]
            answers = iter(llm.generate([ids for ids, _ in jobs], [_params(begin, top) for _, begin in jobs]))
            for record in group:
                sink.write(json.dumps(_result(record, answers), ensure_ascii=False) + "\n")
                progress.advance(task)
            sink.flush()


def _read(file: str) -> Iterator[dict[str, Any]]:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read ({error})") from None
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        if not line.lstrip().startswith("{"):
            yield {"text": line.rstrip("\n")}
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{file}, line {number}: not JSON ({error})") from None
        if not isinstance(record.get("text"), str) and not _has_choices(record):
            raise ConfigError(f'{file}, line {number}: expected "text", or "prompt" and "choices"')
        if record.get("text") == "":
            raise ConfigError(f'{file}, line {number}: "text" is empty')
        yield record


def _has_choices(record: dict[str, Any]) -> bool:
    choices = record.get("choices")
    texts = isinstance(choices, list) and bool(choices) and all(isinstance(choice, str) for choice in choices)
    return isinstance(record.get("prompt"), str) and texts


def _params(begin: int, top: int) -> SamplingParams:
    from exactspec.types import SamplingParams

    return SamplingParams(max_new_tokens=0, temperature=0.0, prompt_logprobs=top, prompt_logprob_start=begin)


def _jobs(tokenizer: Tokenizer, record: dict[str, Any]) -> list[tuple[list[int], int]]:
    """(token ids, first scored position) of each text to run. A choice is scored as prompt + choice, encoded together;
    its tokens are those after the longest common beginning with the prompt's own encoding. Raises ConfigError where
    nothing would be left to score: the sum of no tokens, 0, would beat every choice."""
    if "text" in record:
        return [(tokenizer.encode(record["text"]), 0)]
    prompt_ids = tokenizer.encode(record["prompt"])
    jobs = []
    for choice in record["choices"]:
        ids = tokenizer.encode(record["prompt"] + choice)
        common = 0
        while common < min(len(prompt_ids), len(ids)) and prompt_ids[common] == ids[common]:
            common += 1
        if not common:
            raise ConfigError(f"prompt: {record['prompt']!r:.80} gives no token that could predict a choice")
        if common == len(ids):
            raise ConfigError(f"choices: {choice!r:.80} adds no token to the prompt {record['prompt']!r:.80}")
        jobs.append((ids, common))
    return jobs


def _result(record: dict[str, Any], answers: Iterator[RequestOutput]) -> dict[str, Any]:
    if "text" in record:
        return {**record, **_scores(next(answers))}
    choices = [_scores(next(answers)) for _ in record["choices"]]
    best = max(range(len(choices)), key=lambda i: choices[i]["sum"])
    return {**record, "scores": choices, "best": best}


def _scores(answer: RequestOutput) -> dict[str, Any]:
    import math

    entries = answer.prompt_logprobs or []
    values = [entry.logprob for entry in entries if entry.logprob is not None]
    result: dict[str, Any] = {
        "token_ids": [entry.token_id for entry in entries],
        "logprobs": [entry.logprob for entry in entries],
        "sum": math.fsum(values),
        "perplexity": math.exp(-math.fsum(values) / len(values)) if values else None,
    }
    if any(entry.top for entry in entries):
        result["top"] = [entry.top for entry in entries]
    return result
