"""The small sequential heads of DSpark (arXiv 2607.05147, section 3.1), under the published parameter names.

Notation: r Markov rank, H hidden size, x_{k-1} the token before draft position k (x_0 the anchor), h_k the draft's
final hidden state at position k. Every variant turns the past into a latent u_k [r]; position k's logits gain W2 u_k:

    vanilla  u_k = W1[x_{k-1}]
    gated    u_k = sigmoid(G [h_k; W1[x_{k-1}]] + b) * W1[x_{k-1}]
    rnn      [g; c; o] = J [s_{k-1}; W1[x_{k-1}]; h_k] + b,   s_0 = 0
             s_k = sigmoid(g) * s_{k-1} + (1 - sigmoid(g)) * tanh(c),   u_k = tanh(o)

Separating the latent from its projection lets serving project onto a few candidate tokens instead of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from exactspec.draft.config import BlockDraftConfig
from exactspec.errors import CheckpointError


class MarkovHead(nn.Module):
    """Vanilla head, and the base of the others. `markov_w1` [V, r], `markov_w2` [V, r]."""

    latent_is_w1_row = True  # nothing but the token before decides the latent

    def __init__(self, vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__()
        self.rank = rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)

    def embed(self, token_ids: Tensor) -> Tensor:
        """W1 rows of the previous tokens: int64 [...] -> [..., r]."""
        return self.markov_w1(token_ids)

    def start(self, hidden: Tensor) -> Tensor | None:
        """State before position 1 for hidden [..., H]; None where the variant keeps none."""
        return None

    def step(self, previous: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """previous [..., r] (from `embed`), hidden [..., H] -> (latent [..., r], new state)."""
        return previous, state

    def latents(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """All positions of known blocks at once (training): [..., n, r], [..., n, H] -> [..., n, r]."""
        return self.step(previous, hidden, None)[0]

    def bias(self, latent: Tensor) -> Tensor:
        """[..., r] -> addition to the logits [..., V]."""
        return self.markov_w2(latent)


class GatedMarkovHead(MarkovHead):
    latent_is_w1_row = False

    def __init__(self, vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__(vocab_size, rank, hidden_size)
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def step(self, previous: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, previous], dim=-1)))
        return gate * previous, state


class RnnMarkovHead(MarkovHead):
    latent_is_w1_row = False

    def __init__(self, vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__(vocab_size, rank, hidden_size)
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def start(self, hidden: Tensor) -> Tensor | None:
        return hidden.new_zeros((*hidden.shape[:-1], self.rank))

    def step(self, previous: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        before = state if state is not None else previous.new_zeros(previous.shape)
        gate, candidate, output = self.joint_proj(torch.cat([before, previous, hidden], dim=-1)).chunk(3, dim=-1)
        keep = torch.sigmoid(gate)
        return torch.tanh(output), keep * before + (1 - keep) * torch.tanh(candidate)

    def latents(self, previous: Tensor, hidden: Tensor) -> Tensor:
        state = self.start(hidden[..., 0, :])
        rows = []
        for k in range(previous.shape[-2]):
            latent, state = self.step(previous[..., k, :], hidden[..., k, :], state)
            rows.append(latent)
        return torch.stack(rows, dim=-2)


class ConfidenceHead(nn.Module):
    """Logit of the chance that draft token k is accepted given that those before it were.

    Reads h_k, and W1[x_{k-1}] too when with_markov (rank > 0).
    """

    def __init__(self, hidden_size: int, rank: int, with_markov: bool) -> None:
        super().__init__()
        self.with_markov = with_markov
        self.proj = nn.Linear(hidden_size + (rank if with_markov else 0), 1)

    def forward(self, hidden: Tensor, previous: Tensor | None) -> Tensor:
        """hidden [..., H], previous [..., r] -> logits [...]."""
        rows = torch.cat([hidden, previous], dim=-1) if self.with_markov and previous is not None else hidden
        return self.proj(rows).squeeze(-1)


_MARKOV_HEADS: dict[str, type[MarkovHead]] = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RnnMarkovHead}


def make_markov_head(config: BlockDraftConfig) -> MarkovHead | None:
    """The head that the config names; None for rank 0."""
    if config.markov_rank == 0:
        return None
    head = _MARKOV_HEADS.get(config.markov_head_type)
    if head is None:
        known = ", ".join(_MARKOV_HEADS)
        raise CheckpointError(f"markov_head_type: must be one of {known}, got {config.markov_head_type!r}")
    return head(config.vocab_size, config.markov_rank, config.hidden_size)


def make_confidence_head(config: BlockDraftConfig) -> ConfidenceHead | None:
    if not config.has_confidence_head:
        return None
    return ConfidenceHead(config.hidden_size, config.markov_rank, config.confidence_with_markov)
