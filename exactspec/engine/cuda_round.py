"""Rounds on a CUDA device: the decode round as two graphs (draft, verify), with one read-back; the same bits as eager.

A round of plain requests (no penalties, bias, filters or grammar) runs in buckets of requests: the host writes a few
numbers per request, the draft graph makes the block, the verify graph runs the target over anchor and drafts, feeds the
drafter and draws every row. Whether a draft is accepted is decided from the drawn tokens when they are read. Everything
else, and prefill chunks, takes the ordinary path, whose forward replays a graph bucketed by rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from torch import Tensor

from exactspec.backend.base import KVPool
from exactspec.backend.cuda import sampling
from exactspec.backend.cuda.backend import CudaBackend
from exactspec.backend.cuda.decode import RoundInputs, draw_step, round_rows
from exactspec.backend.cuda.graphs import ForwardGraphs, GraphCache, Graphs, Replay
from exactspec.backend.cuda.linear import CudaLinear
from exactspec.backend.cuda.stack import CudaStack
from exactspec.draft.base import Drafter
from exactspec.draft.block import BlockDrafter
from exactspec.engine.batch import Block, build_batch, page_rows
from exactspec.engine.round import RoundResult, RoundRunner, wants_draw
from exactspec.engine.verify_policy import AcceptByDecree, VerifyAll, VerifyPolicy
from exactspec.model.target import TargetModel
from exactspec.sampling.adjust import AdjustedRows
from exactspec.sampling.noise import NoiseStream
from exactspec.sampling.rows import RowGroup
from exactspec.sampling.sampler import Sampler, SampleResult
from exactspec.scheduler.plan import StepPlan
from exactspec.types import RunningRequest
from exactspec.verify.accept import AcceptResult

REQUEST_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
NUM_INTEGERS = 5  # of a request in the staging buffer; its temperature follows


def is_plain(request: RunningRequest) -> bool:
    """Its draws need nothing but logits, temperature and noise."""
    params = request.params
    return not (
        params.has_penalties
        or params.has_filters
        or params.logit_bias
        or request.grammar is not None
        or request.num_output < params.min_new_tokens
    )


def verifies_all(policy: VerifyPolicy) -> bool:
    """Every draft is verified and acceptance reads the drawn tokens alone."""
    inner = policy.policy if isinstance(policy, AcceptByDecree) else policy
    return isinstance(inner, VerifyAll) and not inner.needs_draft_probs


@dataclass(slots=True)
class _Part:
    """One forward's share of a step."""

    blocks: list[Block]
    hidden: Tensor  # [T, H]
    logits: Tensor | None = None
    token_ids: Tensor | None = None  # [N] drawn
    groups: list[RowGroup] = field(default_factory=list)  # cover all N rows
    sampled_blocks: list[Block] = field(default_factory=list)
    first_logit_row: list[int] = field(default_factory=list)
    accepted: list[AcceptResult] = field(default_factory=list)


@dataclass(slots=True)
class _Drawn:
    """What an acceptance rule reads of the draws."""

    token_ids: Tensor


class CudaRoundRunner(RoundRunner):
    """A RoundRunner whose forwards are captured. `most_requests` as the scheduler's; contexts up to the target's.

    Building one runs the backend's self-check on the target's weights: DeviceError if two tiles of a shape disagree.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter,
        sampler: Sampler,
        policy: VerifyPolicy,
        pool: KVPool,
        page_size: int,
        most_requests: int = REQUEST_BUCKETS[-1],
        graphs: Graphs | None = None,
    ) -> None:
        super().__init__(target, drafter, sampler, policy, pool, page_size)
        pages = -(-(target.config.context_length + drafter.gamma + 1) // page_size)
        pages = min(pages, pool.k.shape[1] // page_size)
        self.most_requests = min(most_requests, REQUEST_BUCKETS[-1])
        cast(CudaBackend, target.backend).self_check(cast(CudaStack, target.stack), cast(CudaLinear, target.lm_head))
        self.graphs: Graphs = graphs if graphs is not None else GraphCache()
        self.forward = ForwardGraphs(
            target, pool, drafter.capture_layers, page_size, self.most_requests + 8, pages, self.device, self.graphs
        )
        self._stage = _Staging(_bucket(self.most_requests), pages, drafter.gamma, self.device)
        self._plain_policy = verifies_all(policy)

    @torch.no_grad()
    def run(self, plan: StepPlan) -> RoundResult:
        if not self._fits(plan):
            return self._run_eagerly(plan)
        parts = [self._decode(plan.decodes)]
        if plan.prefills:
            parts.append(self._prefill(plan))
        return self._join(parts)

    def capture(self, num_requests: Sequence[int] = (1,), sampled: bool = False) -> None:
        """Captures the decode graphs of these request counts ahead of time (they are captured at first use anyway)."""
        for count in num_requests:
            self._draft_graph(_bucket(count), sampled)
            self._verify_graph(_bucket(count), sampled)

    # ---- which way ----------------------------------------------------------------------------------

    def _fits(self, plan: StepPlan) -> bool:
        if not plan.decodes or not self._plain_policy or len(plan.decodes) > self.most_requests:
            return False
        width = max(len(request.pages) for request in plan.decodes)
        if width > self._stage.inputs.page_table.shape[1] or not self.policy.wants_drafts(plan):
            return False
        return all(map(is_plain, plan.decodes)) and all(is_plain(chunk.request) for chunk in plan.prefills)

    def _run_eagerly(self, plan: StepPlan) -> RoundResult:
        drafting = bool(plan.decodes) and self.drafter.gamma > 0 and self.policy.wants_drafts(plan)
        proposal = self._propose(plan.decodes) if drafting else None
        blocks = self._build_blocks(plan, proposal)
        batch = build_batch(blocks, self.page_size, self.device)
        hidden, captured = self.forward(batch)
        self.drafter.observe(batch, captured)
        return self._draw(blocks, batch, hidden, proposal)

    # ---- prefill chunks beside a decode round --------------------------------------------------------

    def _prefill(self, plan: StepPlan) -> _Part:
        blocks = []
        for chunk in plan.prefills:
            rows = chunk.request.token_ids[chunk.start : chunk.end]
            draws = int(chunk.emits and wants_draw(chunk.request))
            blocks.append(Block(chunk.request, chunk.start, rows, draws, is_prefill=True))
        batch = build_batch(blocks, self.page_size, self.device)
        hidden, captured = self.forward(batch)
        self.drafter.observe(batch, captured)
        drawn = [block for block in blocks if block.num_sampled]
        if not drawn:
            return _Part(blocks, hidden)
        logits = self.target.logits(hidden[batch.logit_rows])
        groups = [RowGroup(block.request, block.request.num_output) for block in drawn]
        sampled = self.sampler.sample(logits, groups)
        accepted = self.policy.accept(sampled, groups, None)
        return _Part(blocks, hidden, logits, sampled.token_ids, groups, drawn, list(range(len(drawn))), accepted)

    # ---- the captured decode round -------------------------------------------------------------------

    def _decode(self, decodes: Sequence[RunningRequest]) -> _Part:
        count, gamma = len(decodes), self.drafter.gamma
        bucket = _bucket(count)
        lengths = [min(gamma, request.draft_room) for request in decodes]
        sampled = not all(request.params.greedy for request in decodes)
        verify = self._verify_graph(bucket, sampled)
        if isinstance(self.drafter, BlockDrafter):
            draft = self._draft_graph(bucket, sampled)
            self._stage.fill(decodes, bucket)
            draft.replay()
        else:
            proposal = self._propose(decodes) if gamma else None
            self._stage.fill(decodes, bucket)
            if proposal is not None:
                lengths = proposal.lengths
                self._stage.drafts[:count].copy_(proposal.token_ids)
        hidden, logits, token_ids = verify.replay()
        rows = count * (gamma + 1)
        part = _Part([], hidden[:rows], logits[:rows], token_ids[:rows])
        self._accept(part, decodes, lengths, self._stage.read(count))
        return part

    def _accept(
        self, part: _Part, decodes: Sequence[RunningRequest], lengths: list[int], read: list[list[int]]
    ) -> None:
        """Fills in what the read-back means: rows of read are gamma drafts, then gamma + 1 drawn tokens."""
        gamma = self.drafter.gamma
        judged, drawn = [], []
        for number, (request, length, tokens) in enumerate(zip(decodes, lengths, read, strict=True)):
            drafts = tokens[:length]
            block = Block(
                request, request.kv_len, [request.token_ids[-1], *drafts], length + 1, drafts=drafts,
                num_drafted=length, first_row=number * (gamma + 1),
            )  # fmt: skip
            part.blocks.append(block)
            judged.append(RowGroup(request, request.num_output, drafts))
            drawn += tokens[gamma : gamma + length + 1]
            part.groups.append(RowGroup(request, request.num_output, tokens[:gamma]))
        part.sampled_blocks = part.blocks
        part.first_logit_row = [number * (gamma + 1) for number in range(len(decodes))]
        part.accepted = self.policy.accept(cast(SampleResult, _Drawn(torch.tensor(drawn))), judged, None)

    def _draft_graph(self, bucket: int, sampled: bool) -> Replay:
        return self.graphs.get("draft", (bucket, sampled), lambda: self._draft(bucket, sampled))

    def _verify_graph(self, bucket: int, sampled: bool) -> Replay:
        return self.graphs.get("verify", (bucket, sampled), lambda: self._verify(bucket, sampled))

    def _draft(self, bucket: int, sampled: bool) -> None:
        drafter = cast(BlockDrafter, self.drafter)
        inputs, gamma = self._quiet(bucket), drafter.gamma
        rows = round_rows(inputs, drafter.num_rows, self.page_size, False, drafter.config.mask_token_id)
        out, _ = drafter.stack.forward(drafter._embed(rows.batch.token_ids), rows.batch, drafter.pool)
        out = out.view(bucket, drafter.num_rows, -1)[:, drafter.num_rows - gamma :]
        hidden = drafter.backend.rms_norm(out.reshape(bucket * gamma, -1), drafter._norm, drafter.config.rms_eps)
        base = drafter._whole.lm_head(hidden).view(bucket, gamma, -1)
        noise = (inputs.temperatures, inputs.seeds, inputs.output_positions) if sampled else None
        self._draw_block(drafter, base, hidden.view(bucket, gamma, -1), inputs, noise)

    def _draw_block(
        self,
        drafter: BlockDrafter,
        base: Tensor,
        hidden: Tensor,
        inputs: RoundInputs,
        noise: tuple[Tensor, Tensor, Tensor] | None,
    ) -> None:
        """base [R, G, V] -> the bucket's drafts, left to right where there is a sequential head."""
        bucket, gamma, _ = base.shape
        drafts, valid, stream = self._stage.drafts[:bucket], self.sampler.valid_vocab, int(NoiseStream.TARGET)
        head = drafter._drawer.head
        if head is None:
            temperatures = seeds = positions = None
            if noise is not None:
                temperatures, seeds = (t[:, None].expand(bucket, gamma).reshape(-1) for t in noise[:2])
                positions = (noise[2][:, None] + torch.arange(gamma, device=base.device)).reshape(-1)
            ids, _, _ = sampling.draw(base.flatten(0, 1), temperatures, seeds, positions, stream, valid)
            drafts.copy_(ids.view(bucket, gamma))
            return
        w1, w2 = drafter._drawer._w1, cast(CudaLinear, drafter._whole.markov_w2).weight
        previous = w1[inputs.anchors].float()
        state = head.start(hidden[:, 0])
        for k in range(gamma):
            latent, state = head.step(previous, hidden[:, k], state)
            draw_step(base[:, k], latent, w2, w1, k, drafts[:, k], previous, noise, stream, valid)

    def _verify(self, bucket: int, sampled: bool) -> tuple[Tensor, Tensor, Tensor]:
        gamma = self.drafter.gamma
        rows = round_rows(self._quiet(bucket), gamma + 1, self.page_size, True, None)
        drafts = self._stage.drafts[:bucket]
        rows.batch.token_ids.view(bucket, gamma + 1)[:, 1:] = drafts
        hidden, captured = self.target.forward(rows.batch, self.pool, self.drafter.capture_layers)
        self.drafter.observe(rows.batch, captured)
        logits = self.target.logits(hidden)
        temperatures = rows.temperatures if sampled else None
        stream, valid = int(NoiseStream.TARGET), self.sampler.valid_vocab
        token_ids, _, _ = sampling.draw(logits, temperatures, rows.seeds, rows.output_positions, stream, valid)
        results = self._stage.results[:bucket]
        results[:, :gamma] = drafts
        results[:, gamma:] = token_ids.view(bucket, gamma + 1)
        return hidden, logits, token_ids

    def _quiet(self, bucket: int) -> RoundInputs:
        """The bucket's inputs; all inactive in the run before a capture, so that it writes no K/V."""
        inputs = self._stage.inputs.first(bucket)
        if not self.graphs.is_capturing:
            inputs.active.zero_()
        return inputs

    # ---- one result ------------------------------------------------------------------------------------

    def _join(self, parts: list[_Part]) -> RoundResult:
        """The step's result as the ordinary path would give it. Logits are joined only for those who read them."""
        row, logit_row = 0, 0
        for part in parts:
            for block in part.blocks if row else ():
                block.first_row += row
            row += part.hidden.shape[0]
            part.first_logit_row = [first + logit_row for first in part.first_logit_row]
            logit_row += 0 if part.logits is None else part.logits.shape[0]
        hidden = parts[0].hidden if len(parts) == 1 else torch.cat([part.hidden for part in parts])
        sampled_blocks = [block for part in parts for block in part.sampled_blocks]
        sampled = self._sampled(parts) if any(_reads_logits(block.request) for block in sampled_blocks) else None
        return RoundResult(
            blocks=[block for part in parts for block in part.blocks],
            hidden=hidden,
            logits=None if sampled is None else sampled.logits,
            sampled=sampled,
            sampled_blocks=sampled_blocks,
            first_logit_row=[first for part in parts for first in part.first_logit_row],
            accepted=[accepted for part in parts for accepted in part.accepted],
        )

    def _sampled(self, parts: list[_Part]) -> SampleResult:
        drawn = [part for part in parts if part.logits is not None]
        logits = [part.logits for part in drawn if part.logits is not None]
        token_ids = [part.token_ids for part in drawn if part.token_ids is not None]
        groups = [group for part in drawn for group in part.groups]
        adjusted = AdjustedRows(logits[0] if len(logits) == 1 else torch.cat(logits))
        result = SampleResult(adjusted, groups, self.sampler.valid_vocab, self.sampler.backend)
        result.token_ids = token_ids[0] if len(token_ids) == 1 else torch.cat(token_ids)
        return result


def _reads_logits(request: RunningRequest) -> bool:
    return request.params.logprobs is not None or request.request.sampling_mask is not None


def _bucket(count: int) -> int:
    return next(bucket for bucket in REQUEST_BUCKETS if count <= bucket)


class _Staging:
    """Buffers between host and device, allocated once: inputs by one copy, the page table by another, one read-back."""

    def __init__(self, most: int, pages: int, gamma: int, device: torch.device) -> None:
        self._is_cuda = pinned = device.type == "cuda"
        self._host = torch.zeros((NUM_INTEGERS + 1, most), dtype=torch.int64, pin_memory=pinned)
        self._device = torch.zeros((NUM_INTEGERS + 1, most), dtype=torch.int64, device=device)
        self._host_pages = torch.zeros((most, pages), dtype=torch.int32, pin_memory=pinned)
        numbers = self._device
        self.inputs = RoundInputs(
            numbers[0], numbers[1], numbers[2], numbers[3], numbers[4],
            numbers[NUM_INTEGERS].view(torch.float32)[:most],
            torch.zeros((most, pages), dtype=torch.int32, device=device),
        )  # fmt: skip
        self.drafts = torch.zeros((most, gamma), dtype=torch.int64, device=device)
        self.results = torch.zeros((most, 2 * gamma + 1), dtype=torch.int64, device=device)
        self._host_results = torch.zeros((most, 2 * gamma + 1), dtype=torch.int64, pin_memory=pinned)
        self._numbers, self._table = self._host.numpy(), self._host_pages.numpy()
        self._temperatures = self._host[NUM_INTEGERS].view(torch.float32).numpy()

    def fill(self, decodes: Sequence[RunningRequest], bucket: int) -> None:
        """Sends what a round needs of each request; the rest of the bucket is padding."""
        count = len(decodes)
        numbers = self._numbers
        numbers[0, :count] = [request.token_ids[-1] for request in decodes]
        numbers[1, :count] = [request.kv_len for request in decodes]
        numbers[2, :count] = [request.request.seed for request in decodes]
        numbers[3, :count] = [request.num_output for request in decodes]
        numbers[4, :count] = 1
        numbers[4, count:bucket] = 0
        self._temperatures[:count] = [0.0 if r.params.greedy else r.params.temperature for r in decodes]
        pages: np.ndarray = page_rows(decodes)
        self._table[:count, : pages.shape[1]] = pages
        self._device.copy_(self._host, non_blocking=True)
        self.inputs.page_table[:count].copy_(self._host_pages[:count], non_blocking=True)

    def read(self, count: int) -> list[list[int]]:
        """The results of the first `count` requests: the one synchronisation of a round."""
        self._host_results[:count].copy_(self.results[:count], non_blocking=True)
        if self._is_cuda:
            torch.cuda.current_stream().synchronize()
        rows: list[list[int]] = self._host_results[:count].tolist()
        return rows
