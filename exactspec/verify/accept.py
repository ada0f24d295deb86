"""The decision on verified drafts: coupled (the default, exact token for token) and rejection (for comparison)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from exactspec.backend.base import Backend
from exactspec.sampling.noise import NoiseStream
from exactspec.sampling.row_ops import row_ops
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


@cache
def outcome_sources(num_accepted: int, num_verified: int) -> list[TokenSource]:
    """Sources of what a round commits. The list is shared: read it, copy it, do not change it."""
    if not num_verified:
        return [TokenSource.PLAIN]
    last = TokenSource.BONUS if num_accepted == num_verified else TokenSource.CORRECTION
    return [TokenSource.ACCEPTED] * num_accepted + [last]


def _outcome(group: RowGroup, num_accepted: int, last: int) -> AcceptResult:
    tokens = [*group.draft_tokens[:num_accepted], last]
    return AcceptResult(num_accepted, tokens, outcome_sources(num_accepted, len(group.draft_tokens)))


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
    starts = first_rows(groups)
    judged = [(g, j) for g, group in enumerate(groups) for j in range(len(group.draft_tokens))]
    accepted = [0] * len(groups)
    residual_tokens: dict[int, int] = {}
    if judged:
        tokens = torch.tensor([groups[g].draft_tokens[j] for g, j in judged], device=result.token_ids.device)
        target = torch.softmax(result.processed([starts[g] + j for g, j in judged]), dim=-1)
        draft = _draft_rows(draft_probs, judged, tokens, target)
        index = tokens[:, None]
        coins = _coins(groups, judged, result.backend)
        passed = accepts(target.gather(1, index)[:, 0], draft.gather(1, index)[:, 0], coins).tolist()
        for (g, j), ok in zip(judged, passed, strict=True):
            accepted[g] += int(ok and accepted[g] == j)
        rejecting = [i for i, (g, j) in enumerate(judged) if accepted[g] == j]
        residual_tokens = _draw_residuals(target, draft, judged, rejecting, groups, result.backend)
    rows = torch.tensor([start + count for start, count in zip(starts, accepted, strict=False)], dtype=torch.int64)
    last = result.token_ids[rows.to(result.token_ids.device)].tolist()
    return [_outcome(group, accepted[g], residual_tokens.get(g, last[g])) for g, group in enumerate(groups)]


def accepts(target_probs: Tensor, draft_probs: Tensor, coins: Tensor) -> Tensor:
    """Which drafts pass, each by itself: bool [M] from p and q of the draft token and coins u in [0, 1).

    The test is u * q < p, strictly and in float64, where the product of two float32 numbers is exact: a token with
    p = 0 never passes, one with p >= q > 0 always does.
    """
    return coins.double() * draft_probs.double() < target_probs.double()


def residual_weights(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Weights [M, V] of the draws after a rejection: max(p - q, 0), or p for a row where nothing is left of it."""
    residual = (target_probs - draft_probs).clamp_(min=0.0)
    return torch.where(residual.amax(dim=-1, keepdim=True) > 0, residual, target_probs)


def _draft_rows(
    draft_probs: Tensor | Sequence[Tensor | None] | None, judged: list[tuple[int, int]], tokens: Tensor, like: Tensor
) -> Tensor:
    """q of each judged draft [M, V]; one-hot where the proposal had no randomness."""
    if isinstance(draft_probs, Tensor):
        index = torch.tensor(judged, device=draft_probs.device)
        return draft_probs[index[:, 0], index[:, 1]]
    rows = torch.zeros_like(like).scatter_(1, tokens[:, None], 1.0)
    for i, (g, j) in enumerate(judged):
        probs = None if draft_probs is None else draft_probs[g]
        if probs is not None:
            rows[i] = probs[j]
    return rows


def _noise_keys(groups: Sequence[RowGroup], judged: list[tuple[int, int]], device: torch.device) -> Tensor:
    """[2, M] int64: seed and output position of each judged draft."""
    keys = [[groups[g].seed for g, _ in judged], [groups[g].first_position + j for g, j in judged]]
    return torch.tensor(keys, dtype=torch.int64, device=device)


def _coins(groups: Sequence[RowGroup], judged: list[tuple[int, int]], backend: Backend) -> Tensor:
    """One uniform number in [0, 1) for each judged draft [M] float64: exp(-exp(-g)) undoes a Gumbel number g."""
    seeds, positions = _noise_keys(groups, judged, backend.device)
    gumbel = backend.gumbel(seeds, positions, NoiseStream.ACCEPT, 1)[:, 0].double()
    return torch.exp(-torch.exp(-gumbel)).clamp_(max=LARGEST_COIN)


def _draw_residuals(
    target: Tensor,
    draft: Tensor,
    judged: list[tuple[int, int]],
    rejecting: list[int],
    groups: Sequence[RowGroup],
    backend: Backend,
) -> dict[int, int]:
    """One token for each rejecting group (indexes into `judged`), with noise of its own stream: group -> token."""
    if not rejecting:
        return {}
    index = torch.tensor(rejecting, device=target.device)
    weights = residual_weights(target[index], draft[index]).log()
    chosen = [judged[i] for i in rejecting]
    seeds, positions = _noise_keys(groups, chosen, backend.device)
    noise = backend.gumbel(seeds, positions, NoiseStream.RESIDUAL, weights.shape[1])
    tokens = row_ops(backend).argmax_rows(weights + noise).tolist()
    return {g: token for (g, _), token in zip(chosen, tokens, strict=True)}
