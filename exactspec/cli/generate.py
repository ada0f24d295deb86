"""`exactspec generate`: continue one prompt, streaming; `--json` prints everything that is known about the answer."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exactspec.cli import options as opt
from exactspec.errors import ConfigError

if TYPE_CHECKING:
    from exactspec.engine.llm import StreamChunk
    from exactspec.text.tokenizer import Tokenizer
    from exactspec.types import RequestOutput


def generate(
    model: opt.Model,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - reads it from standard input.")] = None,
    draft: opt.Draft = "none",
    chat: Annotated[
        bool, typer.Option("--chat/--raw", help="Render with the chat template, or take the text as it is.")
    ] = True,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus filter.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep the k most likely tokens; -1 keeps all.")] = -1,
    min_p: Annotated[float, typer.Option(help="Keep tokens at least this likely, relative to the best.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Reproduces a sampled answer.")] = None,
    n: Annotated[int, typer.Option(help="Samples.")] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be given several times.")] = None,
    json_schema: Annotated[
        str | None, typer.Option(help="The answer must fit this JSON schema (extra: grammar).")
    ] = None,
    regex: Annotated[str | None, typer.Option(help="The answer must match this pattern (extra: grammar).")] = None,
    logprobs: Annotated[int | None, typer.Option(help="Logprob of each token and of its k best alternatives.")] = None,
    logprobs_kind: Annotated[str, typer.Option(help="raw, scaled or processed.")] = "raw",
    prompt_logprobs: Annotated[int | None, typer.Option(help="The same for the prompt's tokens.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per sample, with everything.")] = False,
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    numerics: opt.Numerics = "exact",
    acceptance: opt.Acceptance = "coupled",
    gamma: opt.Gamma = None,
    context_length: opt.ContextLength = None,
    kv_tokens: opt.KvTokens = None,
    random_weights: opt.RandomWeights = None,
    tp_size: opt.TpSize = 1,
) -> None:
    """Continue a prompt. The answer is the same with and without --draft; only the time differs."""
    model, prompt = _model_and_prompt(model, prompt, random_weights)
    from exactspec.engine.llm import LLM
    from exactspec.types import SamplingParams

    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        n=n,
        stop=stop,
        json_schema=json_schema,
        regex=regex,
        logprobs=logprobs,
        logprobs_kind=logprobs_kind,  # type: ignore[arg-type]
        prompt_logprobs=prompt_logprobs,
    )
    if not as_json and (prompt_logprobs is not None or (n > 1 and logprobs is not None)):
        raise ConfigError("prompt_logprobs, and logprobs with n over 1, are printed with --json only")
    text = sys.stdin.read() if prompt == "-" else prompt
    llm = LLM(
        model,
        draft=draft,
        device=device,
        dtype=dtype,
        numerics=numerics,
        acceptance=acceptance,
        gamma=gamma,
        context_length=context_length,
        kv_tokens=kv_tokens,
        tensor_parallel=tp_size,
    )
    ids = llm.tokenizer.apply_chat_template([{"role": "user", "content": text}]) if chat else llm.tokenizer.encode(text)
    if as_json or n > 1:
        for answer in llm.generate([ids], params):
            print(
                json.dumps(_record(answer, llm.tokenizer), ensure_ascii=False) if as_json else answer.text, flush=True
            )
        return
    for chunk in llm.stream(ids, params):
        _print_chunk(chunk, llm.tokenizer, show_logprobs=logprobs is not None)
    print()


def _model_and_prompt(model: str, prompt: str | None, random_weights: str | None) -> tuple[str, str]:
    """With random weights no model is named: the first word is the prompt."""
    if random_weights is None:
        if prompt is None:
            raise typer.BadParameter("give a model and a prompt")
        return model, prompt
    if prompt is not None:
        raise ConfigError("random_weights: stands instead of a model; give one of the two")
    return f"random:{random_weights}", model


def _print_chunk(chunk: StreamChunk, tokenizer: Tokenizer, *, show_logprobs: bool) -> None:
    if not show_logprobs:
        print(chunk.text, end="", flush=True)
        return
    for entry, source in zip(chunk.logprobs or [], chunk.sources, strict=True):
        top = "  ".join(f"{tokenizer.decode([i], skip_special_tokens=False)!r} {value:.3f}" for i, value in entry.top)
        token = tokenizer.decode([entry.token_id], skip_special_tokens=False)
        print(f"{entry.logprob:9.4f}  {source.value:10s}  {token!r:16s}  {top}", flush=True)


def _record(answer: RequestOutput, tokenizer: Tokenizer) -> dict[str, Any]:
    """A RequestOutput as plain data, with the accept length and the text of each token beside the ids."""
    record = asdict(answer)
    record["tokens"] = [tokenizer.decode([i], skip_special_tokens=False) for i in answer.token_ids]
    record["stats"]["accept_length"] = answer.stats.accept_length
    return record
