"""From the draft network's rows to draft tokens: the left-to-right loop of DSpark, and its one-shot case, DFlash.

Tokens are drawn with the *target's* noise of the same output position, so that draft and target agree as often as their
distributions allow (Gumbel coupling), while the output depends on the target's draw alone. Where the caller needs the
exact distribution of each draft token (rejection acceptance), tokens are drawn with noise of their own stream.

The Markov correction covers the whole vocabulary: limiting it to the best base logits misses many tokens that only the
correction lifts (3.5% of them among the best 512), and one pass over W2 [V, r] costs little.

Shapes: R requests, G draft positions, V vocabulary, r Markov rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from exactspec.backend.base import Backend, ChainedLinear
from exactspec.draft.base import DraftAdjust, NoiseRows
from exactspec.draft.heads import MarkovHead
from exactspec.sampling.argmax import lowest_argmax
from exactspec.sampling.filters import Filters, filter_dense
from exactspec.sampling.noise import NoiseStream, round_seed
from exactspec.types import RunningRequest, SamplingParams

NUM_BUCKETS = 2048
NUM_FILTERED = 512  # tokens that filters look at where only a draw is asked for


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
    def temperatures(self) -> Tensor:
        """[R] float32, 0 for greedy requests."""
        return torch.where(self.is_sampled, 1.0 / self.inverse_temperature, 0.0)

    @property
    def any_sampled(self) -> bool:
        return bool(self.sampled_rows)

    def scale(self, logits: Tensor) -> Tensor:
        """logits [R, ...] / temperature."""
        if not self.any_sampled:
            return logits
        return logits * self.inverse_temperature.view(-1, *[1] * (logits.dim() - 1))

    def noise_for(self, gamma: int, stream: NoiseStream) -> Tensor | None:
        """[R, G, V], read-only: noise for sampled requests, zeros for greedy ones; None when all are greedy."""
        num_requests = len(self.inverse_temperature)
        if not self.any_sampled:
            return None
        own = self.seeds
        if stream == NoiseStream.DRAFT:
            own = [round_seed(seed, first) for seed, first in zip(own, self.positions, strict=True)]
        seeds = [seed for seed in own for _ in range(gamma)]
        positions = [first + k for first in self.positions for k in range(gamma)]
        drawn = self.noise(seeds, positions, stream).unflatten(0, (-1, gamma))
        if len(self.sampled_rows) == num_requests:
            return drawn
        rows = torch.tensor(self.sampled_rows, device=drawn.device)
        return drawn.new_zeros((num_requests, *drawn.shape[1:])).index_copy_(0, rows, drawn)


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


Rows = Callable[[Tensor], Tensor]  # a Linear, or a target's logits


@dataclass(frozen=True)
class OutputHead:
    """What turns hidden states into logits: the whole vocabulary, or W tokens of it."""

    lm_head: Rows  # [N, H] -> [N, W]
    markov_w2: Rows | None  # [N, r] -> [N, W]
    token_ids: Tensor | None = None  # [W] int64; None: all tokens, W = V

    def tokens(self, places: Tensor) -> Tensor:
        return places if self.token_ids is None else self.token_ids[places]


class BlockDrawer:
    """Draws the tokens of a block, left to right. Holds the Markov head, and its table `w1` [V, r] in the serving
    dtype (None without a head). At most one of the heads it is given has a short vocabulary."""

    def __init__(self, backend: Backend, head: MarkovHead | None, dtype: torch.dtype) -> None:
        self.head = head
        self.w1 = None if head is None else head.markov_w1.weight.detach().to(backend.device, dtype)
        self._short_w1: Tensor | None = None

    def previous(self, token_ids: Tensor) -> Tensor | None:
        """W1 rows [..., r] float32 of token_ids [...]; None without a Markov head."""
        return None if self.w1 is None else self.w1[token_ids].float()

    def draw(
        self,
        output: OutputHead,
        hidden: Tensor,
        anchors: Tensor,
        plan: DrawPlan,
        adjust: DraftAdjust | None = None,
        want_probs: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden [R, G, H] float32, anchors [R] -> token ids [R, G] int64.

        want_probs: also returns the distributions [R, G, V] that tokens were drawn from (one-hot for greedy requests);
        this and `adjust` need an `output` of the whole vocabulary.
        """
        base = output.lm_head(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
        noise = plan.noise_for(hidden.shape[1], NoiseStream.DRAFT if want_probs else NoiseStream.TARGET)
        if noise is not None and output.token_ids is not None:
            noise = noise[..., output.token_ids]
        if self.head is None and adjust is None and plan.filters is None and not want_probs:
            rows = plan.scale(base)
            rows = rows if noise is None else rows + noise
            return output.tokens(lowest_argmax(rows.flatten(0, 1)).view(rows.shape[:2])), None
        chain = self._chain(output)
        if chain is not None and self.w1 is not None and adjust is None and plan.filters is None and not want_probs:
            scale = plan.inverse_temperature if plan.any_sampled else None
            table, before = self._by_place(output, self.w1, anchors)
            return output.tokens(chain.draw_chain(table, base, noise, scale, before)), None
        state = self.head.start(hidden[:, 0]) if self.head is not None else None
        tokens, probs, previous = anchors.new_zeros(base.shape[:2]), [], anchors
        for k in range(base.shape[1]):
            logits = base[:, k]
            if self.head is not None and self.w1 is not None and output.markov_w2 is not None:
                latent, state = self.head.step(self.w1[previous].float(), hidden[:, k], state)
                logits = logits + output.markov_w2(latent)
            if adjust is not None:
                logits = adjust(k, logits, tokens[:, :k])
            row_noise = None if noise is None else noise[:, k]
            if want_probs:
                previous, distribution = _draw_with_probs(plan.scale(logits), row_noise, plan)
                probs.append(distribution)
            else:
                previous = output.tokens(_draw_row(plan.scale(logits), row_noise, plan))
            tokens[:, k] = previous
        return tokens, torch.stack(probs, dim=1) if want_probs else None

    def _chain(self, output: OutputHead) -> ChainedLinear | None:
        """What draws whole blocks at once, where the device and the head allow it."""
        w2 = output.markov_w2
        fits = self.head is not None and self.head.latent_is_w1_row
        return w2 if fits and isinstance(w2, ChainedLinear) else None

    def _by_place(self, output: OutputHead, w1: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """W1 rows in the order of the head's tokens, and the rows of `anchors` there. A short vocabulary may lack an
        anchor, so theirs come behind it; the room for them is kept from round to round."""
        if output.token_ids is None:
            return w1, anchors
        size, count = output.token_ids.shape[0], anchors.shape[0]
        if self._short_w1 is None or self._short_w1.shape[0] < size + count:
            self._short_w1 = torch.cat([w1[output.token_ids], w1.new_empty((2 * count, w1.shape[1]))])
        self._short_w1[size : size + count] = w1[anchors]
        return self._short_w1, torch.arange(size, size + count, device=anchors.device)


def _draw_row(scaled: Tensor, noise: Tensor | None, plan: DrawPlan) -> Tensor:
    """argmax(scaled + noise) [R]. Filters look among the likeliest tokens only: a full sort costs too much."""
    if plan.filters is None:
        return lowest_argmax(scaled if noise is None else scaled + noise)
    candidates = top_tokens(scaled, NUM_FILTERED)
    kept = filter_dense(scaled.gather(-1, candidates), plan.filters)
    kept = kept if noise is None else kept + noise.gather(-1, candidates)
    filtered = candidates.gather(-1, kept.argmax(dim=-1, keepdim=True)).squeeze(-1)
    return torch.where(plan.is_filtered, filtered, lowest_argmax(scaled if noise is None else scaled + noise))


def _draw_with_probs(scaled: Tensor, noise: Tensor | None, plan: DrawPlan) -> tuple[Tensor, Tensor]:
    """Token [R], and the exact distribution [R, V] it was drawn from: softmax, or one-hot for greedy requests. What the
    noise rules out (ids beyond the tokenizer's) has no chance."""
    if noise is not None:
        scaled = scaled.masked_fill(noise == float("-inf"), float("-inf"))
    if plan.filters is not None:
        scaled = filter_dense(scaled, plan.filters)
    token = lowest_argmax(scaled if noise is None else scaled + noise)
    one_hot = torch.zeros_like(scaled).scatter_(1, token[:, None], 1.0)
    return token, torch.where(plan.is_sampled[:, None], scaled.softmax(dim=-1), one_hot)


def top_tokens(values: Tensor, count: int) -> Tensor:
    """Ids of the `count` greatest entries of values [R, V], in no promised order: int64 [R, min(count, V)].

    Exact, in two cheap passes: token t sits in bucket t mod B. The best `count` tokens lie in the `count` buckets with
    the greatest maxima, so the second selection sees only those.
    """
    vocab_size = values.shape[-1]
    if vocab_size <= 2 * NUM_BUCKETS or count >= NUM_BUCKETS:
        return values.topk(min(count, vocab_size), dim=-1, sorted=False).indices
    padding = -vocab_size % NUM_BUCKETS
    if padding:
        values = F.pad(values, (0, padding), value=float("-inf"))
    depth = values.shape[-1] // NUM_BUCKETS
    buckets = values.unflatten(-1, (depth, NUM_BUCKETS)).amax(dim=-2).topk(count, dim=-1, sorted=False).indices
    steps = torch.arange(depth, device=values.device) * NUM_BUCKETS
    members = (buckets.unsqueeze(-1) + steps).flatten(-2)
    best = values.gather(-1, members).topk(count, dim=-1, sorted=False).indices
    return members.gather(-1, best)
