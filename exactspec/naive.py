"""The slow, obvious truth: what a request must return, written for reading.

No cache, no batch, no drafts: for every token the whole sequence goes through the target again. By contract C1
and C2 the engine must give the same tokens and, as floats, the same logprobs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from exactspec.model.target import TargetModel
from exactspec.sampling.row_ops import TORCH_ROW_OPS, RowOps, row_ops
from exactspec.text.detokenizer import Detokenizer
from exactspec.types import FinishReason, ForwardBatch, LogprobsKind, SamplingParams, TokenLogprob

NOISE_STREAM = 0  # the target's
PAGE_SIZE = 16
LOGPROB_FLOOR = torch.finfo(torch.float32).min  # stands for -inf


@dataclass
class NaiveOutput:
    """What a request returns. `logprobs` has one entry per token, `prompt_logprobs` one per prompt position from
    prompt_logprob_start on; both None when not asked for."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    finish: FinishReason = field(default_factory=lambda: FinishReason("length"))


def naive_generate(target: TargetModel, prompt_ids: Sequence[int], params: SamplingParams, seed: int) -> NaiveOutput:
    """Continues one prompt. No grammar. `params.seed` and `params.n` are ignored: `seed` is this sample's."""
    output = NaiveOutput()
    if params.logprobs is not None:
        output.logprobs = []
    if params.prompt_logprobs is not None:
        output.prompt_logprobs = naive_prompt_logprobs(target, prompt_ids, params)
    longest = target.config.context_length - len(prompt_ids)
    limit = longest if params.max_new_tokens is None else min(params.max_new_tokens, longest)
    while len(output.token_ids) < limit:
        logits = sequence_logits(target, [*prompt_ids, *output.token_ids])[-1]
        domains = logit_domains(target, logits, params, output.token_ids)
        token_id = draw(target, domains["processed"], params, seed, len(output.token_ids))
        output.token_ids.append(token_id)
        if output.logprobs is not None:
            row = domains[params.logprobs_kind]
            output.logprobs.append(entry(target, row, token_id, params.logprobs or 0, params))
        matched = stop_match(target, output.token_ids, params)
        if matched is not None:
            output.finish = FinishReason("stop", matched)
            break
    return output


def sequence_logits(target: TargetModel, token_ids: Sequence[int]) -> Tensor:
    """Logits [len(token_ids), V] float32: one forward over fresh memory."""
    count = len(token_ids)
    num_pages = -(-count // PAGE_SIZE)
    device = target.backend.device
    positions = torch.arange(count, dtype=torch.int32, device=device)
    batch = ForwardBatch(
        token_ids=torch.tensor(list(token_ids), dtype=torch.int64, device=device),
        positions=positions,
        slots=positions,
        q_start=torch.tensor([0, count], dtype=torch.int32, device=device),
        kv_len=torch.tensor([count], dtype=torch.int32, device=device),
        page_table=torch.arange(num_pages, dtype=torch.int32, device=device)[None],
        logit_rows=torch.arange(count, device=device),
        page_size=PAGE_SIZE,
        max_kv_len=count,
        max_q_len=count,
    )
    hidden, _ = target.forward(batch, target.make_pool(num_pages * PAGE_SIZE))
    return target.logits(hidden)


def logit_domains(
    target: TargetModel, logits: Tensor, params: SamplingParams, output: Sequence[int]
) -> dict[LogprobsKind, Tensor]:
    """The row of one position in the three kinds of contract C4, each [V]; `output` are the tokens before it."""
    adjusted = adjust(logits, params, output, target.eos_ids)
    scaled = adjusted if params.greedy else adjusted / torch.tensor(params.temperature, dtype=torch.float32)
    keep = torch.zeros_like(scaled, dtype=torch.bool)
    keep[kept_ids(scaled[: valid_vocab(target)], params, row_ops(target.backend))] = True
    processed = scaled.masked_fill(~keep, -math.inf)
    if params.greedy:  # the one token is certain, whatever its logit
        processed = processed.masked_fill(keep, 0.0)
    return {"raw": logits, "scaled": scaled, "processed": processed}


def valid_vocab(target: TargetModel) -> int:
    """Ids from here on are padding of the embedding: never drawn, never listed."""
    return min(target.tokenizer.vocab_size, target.config.vocab_size)


def adjust(logits: Tensor, params: SamplingParams, output: Sequence[int], eos_ids: frozenset[int]) -> Tensor:
    """Penalties over the output tokens, then bias, then no end before min_new_tokens."""
    row = logits.clone()
    if params.has_penalties:
        for token_id, count in Counter(output).items():
            linear = count * torch.tensor(params.frequency_penalty) + torch.tensor(params.presence_penalty)
            value = row[token_id] - linear.to(row.device)
            if params.repetition_penalty != 1.0:
                factor = params.repetition_penalty
                value = value / factor if value > 0 else value * factor
            row[token_id] = value
    for token_id, bias in (params.logit_bias or {}).items():
        row[token_id] += bias
    if len(output) < params.min_new_tokens:
        for token_id in {*eos_ids, *(params.stop_token_ids or ())}:
            if 0 <= token_id < len(row):
                row[token_id] = -math.inf
    return row


def kept_ids(scaled: Tensor, params: SamplingParams, ops: RowOps = TORCH_ROW_OPS) -> Tensor:
    """Ids that can be drawn: the greedy one, or what top-k, then top-p, then min-p leave."""
    total = ops.logsumexp_rows(scaled[None])[1]
    values, ids = scaled.sort(descending=True, stable=True)  # ties: lowest id first
    if params.greedy:
        return ids[:1]
    if 0 < params.top_k < len(ids):
        values, ids = values[: params.top_k], ids[: params.top_k]
    if params.top_p < 1.0:
        # the fewest tokens whose share of what top-k left reaches top_p; sums of multiples of 2**-35 are exact
        mass = (values - total).exp().double().mul(2.0**35).round()
        whole = mass.sum() if len(ids) < len(scaled) else 2.0**35
        nucleus = mass.cumsum(0) - mass < params.top_p * whole
        nucleus[0] = True
        values, ids = values[nucleus], ids[nucleus]
    if params.min_p > 0.0:
        likely = values - values[0] >= math.log(params.min_p)
        ids = ids[likely]
    return ids


def draw(target: TargetModel, processed: Tensor, params: SamplingParams, seed: int, position: int) -> int:
    """argmax of log-weights plus Gumbel noise of (seed, output position): a draw from softmax(processed)."""
    if params.greedy:
        return int(processed.argmax())
    valid = valid_vocab(target)
    device = target.backend.device
    seeds, positions = torch.tensor([seed], device=device), torch.tensor([position], device=device)
    noise = target.backend.gumbel(seeds, positions, NOISE_STREAM, valid)[0]
    return int((processed[:valid] + noise).argmax())


def entry(target: TargetModel, row: Tensor, token_id: int, top_k: int, params: SamplingParams) -> TokenLogprob:
    """Logprobs of one position from its row [V] in the asked kind: log-softmax as x - logsumexp(x), with the device's
    own sum, so that even the last bit must agree."""
    total = row_ops(target.backend).logsumexp_rows(row[None])[1]
    logprobs = (row - total).clamp(min=LOGPROB_FLOOR)
    listed = logprobs[: valid_vocab(target)]
    top = row[: len(listed)].sort(descending=True, stable=True).indices[:top_k].tolist()
    values = logprobs.tolist()
    return TokenLogprob(
        token_id,
        values[token_id],
        tuple((i, values[i]) for i in top),
        tuple((i, values[i]) for i in params.logprob_token_ids or ()),
    )


def naive_prompt_logprobs(target: TargetModel, prompt_ids: Sequence[int], params: SamplingParams) -> list[TokenLogprob]:
    """Raw logprobs of the prompt's tokens from prompt_logprob_start on; position 0 has none."""
    logits = sequence_logits(target, prompt_ids)
    entries = []
    for position in range(params.prompt_logprob_start, len(prompt_ids)):
        if position == 0:
            entries.append(TokenLogprob(prompt_ids[0], None))
            continue
        row = logits[position - 1]
        entries.append(entry(target, row, prompt_ids[position], params.prompt_logprobs or 0, params))
    return entries


def stop_match(target: TargetModel, token_ids: Sequence[int], params: SamplingParams) -> int | str | None:
    """What ends the output after its newest token: a stop string (the one that ends first), a stop id or an end token.
    `ignore_eos` switches off both kinds of tokens."""
    text = Detokenizer(target.tokenizer, params.skip_special_tokens).append(token_ids)  # whole characters only
    ends = [(text.index(stop) + len(stop), stop) for stop in params.stop or () if stop in text]
    if ends:
        return min(ends, key=lambda end: end[0])[1]
    newest = token_ids[-1]
    stops = {*target.eos_ids, *(params.stop_token_ids or ())}
    return newest if newest in stops and not params.ignore_eos else None
