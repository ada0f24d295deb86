"""The decision on verified drafts: coupled (the default, exact token for token) and rejection (for comparison)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from exactspec.backend.base import Backend
from exactspec.sampling.noise import NoiseStream
from exactspec.sampling.argmax import lowest_argmax
from exactspec.sampling.rows import RowGroup, first_rows
from exactspec.types import TokenSource

LARGEST_COIN = 1.0 - 2.0**-53


@dataclass(slots=True)
class AcceptResult:
    """What a round commits: num_accepted drafts, then one token that the target drew."""

    num_accepted: int  # the last token (correction, bonus or plain) not counted
    tokens: list[int]
    sources: list[TokenSource] = field(default_factory=list)


class TargetRows(Protocol):
    """What rejection acceptance reads of a step's draws (a SampleResult)."""

    token_ids: Tensor
    backend: Backend

    def processed(self, rows: Sequence[int]) -> Tensor: ...


def _outcome(group: RowGroup, num_accepted: int, last: int) -> AcceptResult:
    verified = len(group.draft_tokens)
    if not verified:
        kind = TokenSource.PLAIN
    else:
        kind = TokenSource.BONUS if num_accepted == verified else TokenSource.CORRECTION
    tokens = [*group.draft_tokens[:num_accepted], last]
    return AcceptResult(num_accepted, tokens, [TokenSource.ACCEPTED] * num_accepted + [kind])


def accept_coupled(token_ids: Sequence[int] | Tensor, groups: Sequence[RowGroup]) -> list[AcceptResult]:
    """Keep the drafts that equal the target's own draw of their row, up to the first that differs.

    Every committed token is a token the target drew, so drafts cannot change the output, only its speed.
    A tensor is read back once.
    """
    drawn = token_ids.tolist() if isinstance(token_ids, Tensor) else list(token_ids)
    starts = first_rows(groups)
    if len(drawn) != starts[-1]:
        raise ValueError(f"token_ids: expected {starts[-1]} rows, got {len(drawn)}")
    results = []
    for group, start in zip(groups, starts, strict=False):
        accepted = 0
        while accepted < len(group.draft_tokens) and group.draft_tokens[accepted] == drawn[start + accepted]:
            accepted += 1
        results.append(_outcome(group, accepted, drawn[start + accepted]))
    return results


def accept_rejection(
    result: TargetRows, groups: Sequence[RowGroup], draft_probs: Tensor | Sequence[Tensor | None] | None
) -> list[AcceptResult]:
    """Accept draft token x with probability min(1, p(x) / q(x)); at the first rejection draw from the normalised
    positive part of p - q (Leviathan et al. 2023, algorithm 1; Chen et al. 2023, theorem 1).

    draft_probs[g] is q [>= num_drafts, V] of group g, exactly the distributions its drafts were drawn from, or None
    for drafts without randomness (one-hot); None for all of them alike. p is the processed distribution of each row.
    Groups without drafts may follow those that draft_probs covers. Committed tokens have the target's distribution;
    unlike with coupled acceptance they depend on the draft.
    """
    backend = result.backend
    starts = first_rows(groups)
    accepted = [0] * len(groups)
    judged = [g for g, group in enumerate(groups) if group.draft_tokens]
    coins = _coins([groups[g] for g in judged], backend)
    residuals: dict[int, Tensor] = {}
    for g in judged:
        group = groups[g]
        num_drafts = len(group.draft_tokens)
        rows = range(starts[g], starts[g] + num_drafts)
        target = torch.softmax(result.processed(rows), dim=-1)
        draft = None if draft_probs is None else draft_probs[g]
        accepted[g] = count_accepted(target, draft, group.draft_tokens, [coins.pop(0) for _ in rows])
        if accepted[g] < num_drafts:
            residuals[g] = residual_weights(target, draft, group.draft_tokens, accepted[g])
    last = result.token_ids[torch.tensor([starts[g] + a for g, a in enumerate(accepted)], device=backend.device)]
    last_tokens = last.tolist()
    for g, token in _draw_residuals(residuals, groups, accepted, backend).items():
        last_tokens[g] = token
    return [_outcome(group, a, token) for group, a, token in zip(groups, accepted, last_tokens, strict=True)]


def _coins(groups: Sequence[RowGroup], backend: Backend) -> list[float]:
    """One uniform number in [0, 1) for each draft token of each group: u = exp(-exp(-g)) undoes a Gumbel number."""
    keys = [(group.seed, position) for group in groups for position in group.positions[:-1]]
    if not keys:
        return []
    seeds = torch.tensor([seed for seed, _ in keys], dtype=torch.int64, device=backend.device)
    positions = torch.tensor([position for _, position in keys], dtype=torch.int64, device=backend.device)
    gumbel = backend.gumbel(seeds, positions, NoiseStream.ACCEPT, 1)[:, 0].double()
    return torch.exp(-torch.exp(-gumbel)).clamp(max=LARGEST_COIN).tolist()


def count_accepted(
    target_probs: Tensor, draft_probs: Tensor | None, draft_tokens: Sequence[int], coins: Sequence[float]
) -> int:
    """How many leading drafts pass. target_probs [>= m, V]; draft_probs [m, V] or None (one-hot); coins in [0, 1).

    The test is u * q < p, strictly, in float64 where the product of two float32 numbers is exact: a token with p = 0
    never passes, one with p >= q > 0 always does.
    """
    index = torch.tensor(list(draft_tokens), device=target_probs.device)[:, None]
    count = len(draft_tokens)
    target = target_probs[:count].gather(1, index)[:, 0].tolist()
    draft = [1.0] * count if draft_probs is None else draft_probs[:count].gather(1, index)[:, 0].tolist()
    accepted = 0
    while accepted < count and coins[accepted] * draft[accepted] < target[accepted]:
        accepted += 1
    return accepted


def residual_weights(target_probs: Tensor, draft_probs: Tensor | None, draft_tokens: Sequence[int], row: int) -> Tensor:
    """Weights [V] of the draw after draft `row` was rejected: max(p - q, 0), or p where nothing is left of it."""
    target = target_probs[row]
    if draft_probs is None:
        residual = target.clone()
        residual[draft_tokens[row]] = 0.0
    else:
        residual = (target - draft_probs[row]).clamp_(min=0.0)
    return torch.where(residual.amax() > 0, residual, target)


def _draw_residuals(
    residuals: dict[int, Tensor], groups: Sequence[RowGroup], accepted: Sequence[int], backend: Backend
) -> dict[int, int]:
    """Draw one token for each rejecting group with noise of its own stream: group index -> token."""
    if not residuals:
        return {}
    chosen = list(residuals)
    seeds = torch.tensor([groups[g].seed for g in chosen], dtype=torch.int64, device=backend.device)
    positions = torch.tensor([groups[g].positions[accepted[g]] for g in chosen], device=backend.device)
    weights = torch.stack([residuals[g] for g in chosen]).log()
    noise = backend.gumbel(seeds, positions, NoiseStream.RESIDUAL, weights.shape[1])
    tokens = lowest_argmax(torch.where(weights > -math.inf, weights + noise, -math.inf))
    return dict(zip(chosen, tokens.tolist(), strict=True))
