"""Draws the target's token of every row.

A draw is argmax(processed logits / temperature + Gumbel noise of (seed, output position)), which has exactly the
processed distribution (the Gumbel-max trick; Maddison et al., "A* Sampling", 2014, section 2); greedy requests take
the argmax. Everything here is a function of one row and its request, never of the other rows of the call.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from exactspec.backend.base import Backend
from exactspec.sampling.adjust import AdjustedRows, adjust_rows, select_rows
from exactspec.sampling.filters import Filters, filter_dense, kept_ids
from exactspec.sampling.noise import NoiseCache, NoiseStream
from exactspec.sampling.row_ops import RowOps, row_ops
from exactspec.sampling.rows import RowGroup
from exactspec.types import SamplingParams

ID_LIMIT = 2**31
DRAW_CHUNK = 32  # rows of noise that exist at a time


class SampleResult:
    """What one step drew, and the logits in each domain. Everything but `token_ids` is computed when asked."""

    def __init__(self, adjusted: AdjustedRows, groups: Sequence[RowGroup], valid_vocab: int, backend: Backend) -> None:
        self.backend = backend
        self.ops: RowOps = row_ops(backend)
        self.logits: Tensor = adjusted.logits  # [N, V] as the model gave them
        self.token_ids: Tensor = adjusted.logits.new_empty(adjusted.logits.shape[0], dtype=torch.int64)
        self._adjusted = adjusted
        self._params: list[SamplingParams] = [g.params for g in groups for _ in range(g.num_rows)]
        self._valid = valid_vocab
        self._kept: dict[int, Tensor] = {}  # row -> ids the filters kept (CPU)

    @property
    def num_rows(self) -> int:
        return self.logits.shape[0]

    @property
    def adjusted(self) -> Tensor:
        """[N, V] after penalties, bias, min_new_tokens and grammar; the logits object itself if nothing applied."""
        return self._adjusted.all()

    def raw(self, rows: Sequence[int]) -> Tensor:
        """The model's logits of these rows. Read-only, as all the tensors given out here."""
        return select_rows(self.logits, rows)

    def scaled(self, rows: Sequence[int]) -> Tensor:
        """Adjusted logits divided by the request's temperature (greedy: 1). [len(rows), V]"""
        picked = self._adjusted.select(rows)
        temperatures = [self._temperature(row) for row in rows]
        if all(t == 1.0 for t in temperatures):
            return picked
        return picked / torch.tensor(temperatures, dtype=torch.float32, device=picked.device)[:, None]

    def processed(self, rows: Sequence[int]) -> Tensor:
        """Log-domain weights of the distribution drawn from: scaled, -inf where filtered or padded; greedy rows are
        one-hot. [len(rows), V]"""
        scaled = self.scaled(rows)
        if self._valid == scaled.shape[1] and not any(
            self._params[r].greedy or self._params[r].has_filters for r in rows
        ):
            return scaled
        out = torch.full_like(scaled, -math.inf)
        plain = [i for i, r in enumerate(rows) if not self._params[r].greedy and not self._params[r].has_filters]
        greedy = [i for i, r in enumerate(rows) if self._params[r].greedy]
        if plain:
            index = torch.tensor(plain, device=out.device)
            out[index, : self._valid] = scaled[index, : self._valid]
        if greedy:
            index = torch.tensor(greedy, device=out.device)
            out[index, self.ops.argmax_rows(scaled[index, : self._valid])] = 0.0
        filtered = [i for i, r in enumerate(rows) if self._params[r].has_filters]
        if filtered:
            self._put_filtered(out, scaled, rows, filtered)
        return out

    def _temperature(self, row: int) -> float:
        params = self._params[row]
        return 1.0 if params.greedy else params.temperature

    def _kept_ids(self, rows: Sequence[int], scaled: Tensor) -> list[Tensor]:
        """Ids that the filters keep of these rows (CPU), by falling logit; found once for each row."""
        missing = [i for i, row in enumerate(rows) if row not in self._kept]
        if missing:
            filters = [Filters.of(self._params[rows[i]]) for i in missing]
            found = kept_ids(select_rows(scaled, missing)[:, : self._valid], filters, self.ops)
            self._kept.update(zip((rows[i] for i in missing), found, strict=True))
        return [self._kept[row] for row in rows]

    def _put_filtered(self, out: Tensor, scaled: Tensor, rows: Sequence[int], filtered: list[int]) -> None:
        picked = select_rows(scaled, filtered)
        if out.device.type == "cpu":
            kept = self._kept_ids([rows[i] for i in filtered], picked)
            for i, values, ids in zip(filtered, picked, kept, strict=True):
                out[i, ids] = values[ids]
            return
        filters = [Filters.of(self._params[rows[i]]) for i in filtered]
        index = torch.tensor(filtered, device=out.device)
        out[index, : self._valid] = filter_dense(picked[:, : self._valid], filters, self.ops)


def sampling_support(result: SampleResult, rows: Sequence[int]) -> list[tuple[list[int], list[float]]]:
    """Per row: (ids, log-probabilities) of the tokens that could be drawn, ids rising, renormalised over them.

    A greedy row is its argmax with exactly 0.0.
    """
    supports = []
    for row in rows:
        weights = result.processed([row])
        ids = (weights[0] > -math.inf).nonzero()[:, 0]
        logprobs = weights[0, ids] - result.ops.logsumexp_rows(weights)[1]
        supports.append((ids.tolist(), logprobs.tolist()))
    return supports


class Sampler:
    """The one sampler of the engine: prefill rows, single rows and verify blocks all come here."""

    def __init__(
        self,
        backend: Backend,
        vocab_size: int,
        valid_vocab: int,
        eos_ids: Iterable[int],
        noise: NoiseCache | None = None,
    ) -> None:
        """vocab_size is the width of a logit row; ids at and beyond valid_vocab are padding and never drawn."""
        self.backend = backend
        self.ops: RowOps = row_ops(backend)
        self.vocab_size = vocab_size
        self.valid_vocab = valid_vocab
        self.eos_ids = frozenset(eos_ids)
        self._scratch = torch.empty((DRAW_CHUNK, vocab_size), device=backend.device)
        self.noise = noise or NoiseCache(backend, vocab_size, valid_vocab)

    def sample(self, logits: Tensor, groups: Sequence[RowGroup]) -> SampleResult:
        """logits [N, V] float32, left unchanged; groups name the rows in order, N rows in all."""
        count = sum(group.num_rows for group in groups)
        if logits.shape != (count, self.vocab_size):
            raise ValueError(f"logits: expected shape {(count, self.vocab_size)}, got {tuple(logits.shape)}")
        result = SampleResult(adjust_rows(logits, groups, self.eos_ids), groups, self.valid_vocab, self.backend)
        self._draw(result, groups)
        return result

    def _draw(self, result: SampleResult, groups: Sequence[RowGroup]) -> None:
        keys = [(group.seed, position) for group in groups for position in group.positions]
        params = [group.params for group in groups for _ in range(group.num_rows)]
        greedy = [row for row, p in enumerate(params) if p.greedy]
        if len(greedy) == result.num_rows:
            result.token_ids = self.ops.argmax_rows(result.adjusted[:, : self.valid_vocab])
            return
        if greedy:
            best = self.ops.argmax_rows(result._adjusted.select(greedy)[:, : self.valid_vocab])
            result.token_ids[torch.tensor(greedy, device=best.device)] = best
        drawn = [row for row, p in enumerate(params) if not p.greedy]
        for start in range(0, len(drawn), DRAW_CHUNK):
            self._draw_rows(result, drawn[start : start + DRAW_CHUNK], keys, params)

    def _draw_rows(
        self, result: SampleResult, rows: list[int], keys: list[tuple[int, int]], params: list[SamplingParams]
    ) -> None:
        """Rows that are not greedy. On a CPU rows with filters go their own way: only the kept tokens take part."""
        noise = self.noise.rows([keys[r][0] for r in rows], [keys[r][1] for r in rows], NoiseStream.TARGET)
        filtered = [i for i, r in enumerate(rows) if params[r].has_filters] if noise.device.type == "cpu" else []
        if filtered:
            picked = [rows[i] for i in filtered]
            tokens = self._draw_kept(result, picked, select_rows(noise, filtered))
            result.token_ids[torch.tensor(picked)] = tokens
        plain = sorted(set(range(len(rows))).difference(filtered))
        if plain:
            picked = [rows[i] for i in plain]
            weights = result.scaled(picked) if noise.device.type == "cpu" else result.processed(picked)
            scratch = self._scratch[: len(plain)]
            torch.add(weights, select_rows(noise, plain), out=scratch)
            result.token_ids[torch.tensor(picked, device=noise.device)] = self.ops.argmax_rows(scratch)

    @staticmethod
    def _draw_kept(result: SampleResult, rows: list[int], noise: Tensor) -> Tensor:
        """argmax over the kept tokens of each row, ties to the lowest id. [len(rows)] int64"""
        scaled = result.scaled(rows)
        kept = result._kept_ids(rows, scaled)
        ids = torch.nn.utils.rnn.pad_sequence(kept, batch_first=True, padding_value=-1)
        inside = ids.clamp(min=0)
        scores = torch.where(ids >= 0, scaled.gather(1, inside) + noise.gather(1, inside), -math.inf)
        best = (scores == scores.amax(dim=-1, keepdim=True)) & (ids >= 0)
        return torch.where(best, ids, ID_LIMIT).amin(dim=-1)
