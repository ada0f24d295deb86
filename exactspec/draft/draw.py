"""From the draft network's rows to draft tokens: the left-to-right loop of DSpark, and its one-shot case, DFlash.

Tokens are drawn with the *target's* noise of the same output position, so that draft and target agree as often as their
distributions allow (Gumbel coupling), while the output depends on the target's draw alone. Where the caller needs the
exact distribution of each draft token (rejection acceptance), tokens are drawn with noise of their own stream.

Shapes: R requests, G draft positions, V vocabulary, K candidates, r Markov rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from exactspec.backend.base import Backend, Linear
from exactspec.draft.base import DraftAdjust, NoiseRows
from exactspec.draft.heads import MarkovHead
from exactspec.sampling.argmax import lowest_argmax
from exactspec.sampling.filters import Filters, filter_dense
from exactspec.sampling.noise import NoiseStream
from exactspec.types import RunningRequest, SamplingParams

NUM_CANDIDATES = 64
_NUM_BUCKETS = 2048


@dataclass(frozen=True)
class DrawPlan:
    """How each request draws, from host values; tensors on the device."""

    inverse_temperature: Tensor  # [R] float32, 1 for greedy requests
    is_sampled: Tensor  # [R] bool
    is_filtered: Tensor  # [R] bool
    filters: list[Filters] | None  # one per request; None: nobody filters
    sampled_rows: list[int]  # requests that are not greedy
    seeds: list[int]  # of the sampled rows
    positions: list[int]  # output position of the first draft token, of the sampled rows
    noise: NoiseRows

    @property
    def any_sampled(self) -> bool:
        return bool(self.sampled_rows)

    def scale(self, logits: Tensor) -> Tensor:
        """logits [R, ...] / temperature."""
        if not self.any_sampled:
            return logits
        return logits * self.inverse_temperature.view(-1, *[1] * (logits.dim() - 1))

    def filter(self, scaled: Tensor) -> Tensor:
        """[R, N] -> -inf outside of each request's top-k, top-p and min-p, by the target's own rule."""
        return scaled if self.filters is None else filter_dense(scaled, self.filters)

    def noise_for(self, shape: torch.Size, stream: NoiseStream) -> Tensor | None:
        """[R, G, V], read-only: noise for sampled requests, zeros for greedy ones; None when all are greedy."""
        num_requests, gamma, _ = shape
        if not self.any_sampled:
            return None
        seeds = [seed for seed in self.seeds for _ in range(gamma)]
        positions = [first + k for first in self.positions for k in range(gamma)]
        drawn = self.noise(seeds, positions, stream).unflatten(0, (-1, gamma))
        if len(self.sampled_rows) == num_requests:
            return drawn
        rows = torch.tensor(self.sampled_rows, device=drawn.device)
        return drawn.new_zeros(shape).index_copy_(0, rows, drawn)


def make_plan(requests: Sequence[RunningRequest], noise: NoiseRows, device: torch.device) -> DrawPlan:
    params = [request.params for request in requests]
    filtered = [p.has_filters for p in params]
    sampled = [row for row, p in enumerate(params) if not p.greedy]
    temperatures = [1.0 if p.greedy else 1.0 / p.temperature for p in params]
    return DrawPlan(
        inverse_temperature=torch.tensor(temperatures, dtype=torch.float32, device=device),
        is_sampled=torch.tensor([not p.greedy for p in params], device=device),
        is_filtered=torch.tensor(filtered, device=device),
        filters=[_filters_of(p) for p in params] if any(filtered) else None,
        sampled_rows=sampled,
        seeds=[requests[row].request.seed for row in sampled],
        positions=[requests[row].num_output for row in sampled],
        noise=noise,
    )


def _filters_of(params: SamplingParams) -> Filters:
    return Filters.of(params) if params.has_filters else Filters(-1, 1.0, 0.0)


def backend_noise(backend: Backend, vocab_size: int) -> NoiseRows:
    """Noise straight from the device, for callers that share none."""

    def rows(seeds: Sequence[int], positions: Sequence[int], stream: NoiseStream) -> Tensor:
        pairs = torch.tensor([seeds, positions], dtype=torch.int64, device=backend.device)
        return backend.gumbel(pairs[0], pairs[1], int(stream), vocab_size)

    return rows


class BlockDrawer:
    """Draws the tokens of a block. Holds the Markov tables in the serving dtype.

    `num_candidates` limits the Markov correction to the best tokens of each position's base logits (with its noise
    where sampled): a full correction would read the table W2 [V, r] once per position.
    """

    def __init__(
        self, backend: Backend, head: MarkovHead | None, dtype: torch.dtype, num_candidates: int = NUM_CANDIDATES
    ) -> None:
        self.backend = backend
        self.num_candidates = num_candidates
        self.head = head
        self._project: Linear | None = None
        if head is not None:
            self._w1 = head.markov_w1.weight.detach().to(backend.device, dtype)
            self._w2 = head.markov_w2.weight.detach().to(backend.device, dtype)

    def previous(self, token_ids: Tensor) -> Tensor | None:
        """W1 rows [..., r] float32 of token_ids [...]; None without a Markov head."""
        return None if self.head is None else self._w1[token_ids].float()

    def draw(self, base: Tensor, hidden: Tensor, anchors: Tensor, plan: DrawPlan) -> Tensor:
        """base [R, G, V] float32 logits, hidden [R, G, H], anchors [R] -> token ids [R, G] int64."""
        scaled = plan.scale(base)
        noise = plan.noise_for(base.shape, NoiseStream.TARGET)
        ranking = scaled
        if noise is not None:
            # filters keep the likeliest tokens, so filtered requests choose their candidates without noise
            ranking = scaled + (
                noise if plan.filters is None else noise.masked_fill(plan.is_filtered[:, None, None], 0.0)
            )
        if self.head is None and plan.filters is None:
            return lowest_argmax(ranking.flatten(0, 1)).view(ranking.shape[:2])
        candidates = top_tokens(ranking, self.num_candidates)
        scores = scaled.gather(-1, candidates)
        candidate_noise = None if noise is None else noise.gather(-1, candidates)
        w2 = self._w2[candidates].float() if self.head is not None else None  # [R, G, K, r]

        def choose(k: int, latent: Tensor | None) -> Tensor:
            row = scores[:, k]
            if w2 is not None and latent is not None:
                bias = torch.matmul(w2[:, k], latent.unsqueeze(-1)).squeeze(-1)
                row = row + plan.scale(bias)
            row = plan.filter(row)
            if candidate_noise is not None:
                row = row + candidate_noise[:, k]
            return candidates[:, k].gather(-1, row.argmax(dim=-1, keepdim=True)).squeeze(-1)

        return self._left_to_right(hidden, anchors, choose)

    def draw_full(
        self,
        base: Tensor,
        hidden: Tensor,
        anchors: Tensor,
        plan: DrawPlan,
        adjust: DraftAdjust | None,
        want_probs: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Like `draw` over the whole vocabulary, with `adjust` on each position's logits.

        want_probs: also returns the distributions [R, G, V] that tokens were drawn from (one-hot for greedy requests).
        """
        noise = plan.noise_for(base.shape, NoiseStream.DRAFT if want_probs else NoiseStream.TARGET)
        probs: list[Tensor] = []
        drawn: list[Tensor] = []

        def choose(k: int, latent: Tensor | None) -> Tensor:
            row = base[:, k]
            if latent is not None:
                row = row + self._bias(latent)
            if adjust is not None:
                before = torch.stack(drawn, dim=1) if drawn else anchors.new_zeros((anchors.shape[0], 0))
                row = adjust(k, row, before)
            row = plan.filter(plan.scale(row))
            token = lowest_argmax(row if noise is None else row + noise[:, k])
            if want_probs:
                probs.append(_distribution(row, token, plan))
            drawn.append(token)
            return token

        tokens = self._left_to_right(hidden, anchors, choose)
        return tokens, torch.stack(probs, dim=1) if want_probs else None

    def _left_to_right(self, hidden: Tensor, anchors: Tensor, choose: Callable[[int, Tensor | None], Tensor]) -> Tensor:
        tokens: list[Tensor] = []
        previous = anchors
        state = self.head.start(hidden[:, 0]) if self.head is not None else None
        for k in range(hidden.shape[1]):
            latent = None
            if self.head is not None:
                latent, state = self.head.step(self._w1[previous].float(), hidden[:, k], state)
            previous = choose(k, latent)
            tokens.append(previous)
        return torch.stack(tokens, dim=1)

    def _bias(self, latent: Tensor) -> Tensor:
        if self._project is None:
            self._project = self.backend.make_linear(self._w2)
        return self._project(latent)


def _distribution(row: Tensor, token: Tensor, plan: DrawPlan) -> Tensor:
    """softmax of what was drawn from [R, V]; one-hot at the token for greedy requests."""
    one_hot = torch.zeros_like(row).scatter_(1, token[:, None], 1.0)
    return torch.where(plan.is_sampled[:, None], row.softmax(dim=-1), one_hot)


def top_tokens(values: Tensor, count: int) -> Tensor:
    """Ids of the `count` greatest entries of values [R, G, V], in no promised order: int64 [R, G, min(count, V)].

    Exact, in two cheap passes: token t sits in bucket t mod B. The best `count` tokens lie in the `count` buckets with
    the greatest maxima, so the second selection sees only those.
    """
    vocab_size = values.shape[-1]
    if vocab_size <= 2 * _NUM_BUCKETS or count >= _NUM_BUCKETS:
        return values.topk(min(count, vocab_size), dim=-1, sorted=False).indices
    padding = -vocab_size % _NUM_BUCKETS
    if padding:
        values = F.pad(values, (0, padding), value=float("-inf"))
    depth = values.shape[-1] // _NUM_BUCKETS
    buckets = values.unflatten(-1, (depth, _NUM_BUCKETS)).amax(dim=-2).topk(count, dim=-1, sorted=False).indices
    steps = torch.arange(depth, device=values.device) * _NUM_BUCKETS
    members = (buckets.unsqueeze(-1) + steps).flatten(-2)
    best = values.gather(-1, members).topk(count, dim=-1, sorted=False).indices
    return members.gather(-1, best)
