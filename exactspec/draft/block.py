"""The block drafter: DFlash and DSpark in serving, over paged draft K/V that lives at the target's own slots.

One draft forward covers a whole block: rows [anchor, mask, mask, ...] at positions anchor .. anchor + n - 1 attend to
the context before the anchor and to each other. The block's own K/V land in the slots of those positions; they mean
nothing after the round and are overwritten when the target has been there (`observe`) or by the next block. The context
K/V of a token depend on its target features and position alone, so prefix hits and retraction need no bookkeeping, and
may be made late: `postpone` keeps the features (backlog.py), and `propose` first makes up for what its requests lack.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from exactspec.backend.parallel import head_linear, shard_layer, shard_spec
from exactspec.draft.backlog import Backlog
from exactspec.draft.base import DraftBatch, Drafter
from exactspec.draft.block_model import BlockModel
from exactspec.draft.calibration import Calibration, scale_logits, table_on
from exactspec.draft.draw import BlockDrawer, OutputHead, Rows, backend_noise, make_plan
from exactspec.draft.vocabulary import head_rows
from exactspec.errors import ConfigError
from exactspec.model.config import ROPE_SLACK
from exactspec.model.target import TargetModel
from exactspec.types import ForwardBatch, Proposal, RunningRequest

CATCH_UP_ROWS = 512  # at a time


class BlockDrafter(Drafter):
    """Serves a BlockModel beside a target.

    gamma: draft tokens per round, at most what the block was trained for (ConfigError otherwise); None takes all.
    calibration: of the confidence. num_slots: slots of the target's pool.
    short_vocab: rising ids of the only tokens to propose, where nothing needs the whole vocabulary.

    For runners that draw blocks in a way of their own: `predict`, then `output` (the whole vocabulary), `drawer`,
    `confidence_head` and `confidence_scales` (calibration.table_on; None: not calibrated).
    """

    def __init__(
        self,
        model: BlockModel,
        target: TargetModel,
        num_slots: int,
        gamma: int | None = None,
        calibration: Calibration | None = None,
        short_vocab: Sequence[int] | None = None,
    ) -> None:
        config = model.config
        self.config = config
        self.target = target
        self.backend = target.backend
        self.gamma = _checked_gamma(gamma, config.gamma)
        self.capture_layers = config.target_layer_ids
        self.num_rows = self.gamma if config.sample_from_anchor else self.gamma + 1
        device, dtype = self.backend.device, target.dtype
        whole, parallel = model.stack_spec(), self.backend.parallel
        spec = shard_spec(whole, parallel, "draft")
        num_positions = target.config.context_length + max(ROPE_SLACK, self.num_rows)
        rope = model.rope_table(num_positions, device)
        layers = [shard_layer(layer, whole, parallel) for layer in model.layer_weights(dtype)]
        self.stack = self.backend.make_stack(spec, layers, [rope])
        self.pool = self.backend.make_pool(spec, num_slots, dtype)
        self._fc = self.backend.make_linear(model.fc.weight.detach().to(device, dtype))
        self._hidden_norm = model.hidden_norm.weight.detach().to(device, torch.float32)
        self._norm = model.norm.weight.detach().to(device, torch.float32)
        self._embedding = model.embed_tokens.weight.detach().to(device, dtype) if model.embed_tokens else None
        heads = model.to(device)
        self.drawer = BlockDrawer(self.backend, heads.markov_head, dtype)
        self.confidence_head = heads.confidence_head
        self.output, self._short = _output_heads(heads, target, short_vocab)
        self.calibrated = calibration is not None
        self.confidence_scales = None if calibration is None else table_on(calibration, self.gamma, device)
        self._num_slots = num_slots
        self._backlog: Backlog | None = None  # made when something is postponed

    @torch.no_grad()
    def observe(self, batch: ForwardBatch, captured: Tensor | None) -> None:
        self._learn(self._checked(captured), batch.positions, batch.slots)
        if self._backlog is not None:
            self._backlog.strike(batch.slots)

    def postpone(self, batch: ForwardBatch, captured: Tensor | None) -> None:
        features = self._checked(captured)
        if self._backlog is None:  # features are rounded here as `fc` would round them
            self._backlog = Backlog(self._num_slots, features.shape[1], self.target.dtype, features.device)
        self._backlog.keep(batch.slots, features)

    def _checked(self, captured: Tensor | None) -> Tensor:
        if captured is None:
            raise ValueError(f"a block drafter needs the target layers {self.capture_layers} captured")
        return captured

    def _learn(self, features: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Writes the context K/V of rows: features [T, len(capture_layers) * H] float32, positions and slots [T]."""
        context = self.backend.rms_norm(self._fc(features), self._hidden_norm, self.config.rms_eps)
        self.stack.write_context(context, positions, slots, self.pool)

    def _catch_up(self, backlog: Backlog, batch: DraftBatch) -> None:
        began = time.perf_counter()
        positions, slots = backlog.behind(batch.page_table, batch.anchor_positions, batch.page_size)
        for start in range(0, slots.shape[0], CATCH_UP_ROWS):
            rows = slice(start, start + CATCH_UP_ROWS)
            self._learn(backlog.features(slots[rows]), positions[rows], slots[rows])
        backlog.done(slots, batch.requests)
        self.catch_up_seconds += time.perf_counter() - began

    def forget(self, request: RunningRequest) -> None:
        if self._backlog is not None:
            self._backlog.forget(request)

    @torch.no_grad()
    def propose(self, batch: DraftBatch) -> Proposal:
        lengths = [min(self.gamma, request.draft_room) for request in batch.requests]
        if not any(lengths):
            return Proposal(batch.anchor_ids.new_zeros((len(lengths), self.gamma)), lengths)
        if self._backlog is not None and not self._backlog.is_done(batch.requests):
            self._catch_up(self._backlog, batch)
        hidden = self.predict(self._block_batch(batch))
        noise = batch.noise or backend_noise(self.backend, self.config.vocab_size)
        plan = make_plan(batch.requests, noise, hidden.device)
        output = self.output if batch.adjust is not None or batch.want_probs else self._short
        tokens, probs = self.drawer.draw(output, hidden, batch.anchor_ids, plan, batch.adjust, batch.want_probs)
        confidence = None
        if batch.want_confidence:
            confidence = self._confidence(hidden, batch.anchor_ids, tokens, plan.temperatures)
        return Proposal(tokens, lengths, probs, confidence)

    def predict(self, block: ForwardBatch) -> Tensor:
        """Final normed states of the predicting rows: [R, gamma, H] float32. block: num_rows rows of each request."""
        out, _ = self.stack.forward(self._embed(block.token_ids), block, self.pool)
        out = out.view(block.num_requests, self.num_rows, -1)[:, self.num_rows - self.gamma :]
        normed = self.backend.rms_norm(out.reshape(-1, out.shape[-1]), self._norm, self.config.rms_eps)
        return normed.view(block.num_requests, self.gamma, -1)

    def _block_batch(self, batch: DraftBatch) -> ForwardBatch:
        num_requests, num_rows = len(batch.requests), self.num_rows
        device = batch.anchor_ids.device
        token_ids = batch.anchor_ids.new_full((num_requests, num_rows), self.config.mask_token_id)
        token_ids[:, 0] = batch.anchor_ids
        positions = batch.anchor_positions[:, None] + torch.arange(num_rows, dtype=torch.int32, device=device)
        pages = batch.page_table.gather(1, (positions // batch.page_size).long())
        slots = pages * batch.page_size + positions % batch.page_size
        return ForwardBatch(
            token_ids=token_ids.flatten(),
            positions=positions.flatten(),
            slots=slots.flatten(),
            q_start=torch.arange(num_requests + 1, dtype=torch.int32, device=device) * num_rows,
            kv_len=batch.anchor_positions + num_rows,
            page_table=batch.page_table,
            logit_rows=token_ids.new_zeros(0),
            page_size=batch.page_size,
            causal=False,
            max_kv_len=batch.max_kv_len + num_rows,
            max_q_len=num_rows,
        )

    def _embed(self, token_ids: Tensor) -> Tensor:
        return self.target.embed(token_ids) if self._embedding is None else self._embedding[token_ids].float()

    def _confidence(self, hidden: Tensor, anchors: Tensor, tokens: Tensor, temperatures: Tensor) -> Tensor | None:
        """[R, gamma]: chance that each draft is accepted given that those before it were; temperatures [R], 0 for
        greedy requests."""
        if self.confidence_head is None:
            return None
        before = torch.cat([anchors[:, None], tokens[:, :-1]], dim=1)
        logits = self.confidence_head(hidden, self.drawer.previous(before))
        scales = self.confidence_scales
        return torch.sigmoid(logits if scales is None else scale_logits(logits, scales, temperatures))


def _output_heads(
    model: BlockModel, target: TargetModel, short_vocab: Sequence[int] | None
) -> tuple[OutputHead, OutputHead]:
    """The head over the whole vocabulary, and the one for plain drawing: the same without a short vocabulary."""
    backend, device, dtype = target.backend, target.backend.device, target.dtype
    w2 = None if model.markov_head is None else model.markov_head.markov_w2.weight.detach().to(device, dtype)
    lm_head: Rows = target.logits
    if model.lm_head is not None:
        lm_head = head_linear(backend, model.lm_head.weight.detach().to(device, dtype))
    whole = OutputHead(lm_head, None if w2 is None else backend.make_linear(w2))
    if short_vocab is None:
        return whole, whole
    ids = torch.tensor(short_vocab, dtype=torch.int64, device=device)
    rows = head_rows(lm_head, model.config.hidden_size, ids).to(dtype)
    return whole, OutputHead(backend.make_linear(rows), None if w2 is None else backend.make_linear(w2[ids]), ids)


def _checked_gamma(asked: int | None, trained: int) -> int:
    if asked is None:
        return trained
    if not 1 <= asked <= trained:
        raise ConfigError(f"gamma: must be from 1 to {trained}, the block this draft was trained for, got {asked}")
    return asked
