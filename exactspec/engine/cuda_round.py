"""Rounds on a CUDA device: the decode round as two graphs (draft, verify), with one read-back; the same bits as eager.

A round of plain requests (no penalties, bias, filters or grammar) runs in buckets of requests: the host sends a message
of a few numbers per request, the draft graph makes the block, the verify graph runs the target over anchors and drafts,
feeds the drafter, draws every row, accepts, and scores the rows that are emitted. How many drafts are verified in all,
the policy says before they exist; which, the device decides (backend/cuda/share.py). What the next round needs stays on
the device (backend/cuda/seats.py), so that one can be launched behind it unread. Everything else, and prefill chunks,
takes the ordinary path, whose forward replays a graph bucketed by rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence, Set
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from torch import Tensor

from exactspec.backend.base import KVPool
from exactspec.backend.cuda import sampling
from exactspec.backend.cuda.backend import CudaBackend
from exactspec.backend.cuda.confidence import block_confidence
from exactspec.backend.cuda.decode import RoundInputs, draft_rows
from exactspec.backend.cuda.graphs import ForwardGraphs, GraphCache, Graphs, Replay
from exactspec.backend.cuda.linear import CudaLinear
from exactspec.backend.cuda.seats import DRAFTS, Column, judge, take_seats
from exactspec.backend.cuda.share import share_places, verify_rows
from exactspec.backend.cuda.stack import CudaStack
from exactspec.draft.base import Drafter
from exactspec.draft.block import BlockDrafter
from exactspec.draft.heads import ConfidenceHead
from exactspec.engine.batch import Block, build_batch
from exactspec.engine.cuda_draws import VerifiedRows, draw_block, draw_block_with_probs, reject
from exactspec.engine.cuda_stage import (
    REQUEST_BUCKETS,
    RoundShape,
    RoundStage,
    Slot,
    draft_levels,
    is_plain,
    needs_rows,
    request_bucket,
)
from exactspec.engine.round import DecodedRound, Flight, RoundResult, RoundRunner, wants_draw
from exactspec.engine.verify_policy import AcceptByDecree, VerifyPolicy
from exactspec.logprobs.processor import pack_scores, unpack_scores
from exactspec.model.target import TargetModel
from exactspec.sampling.adjust import AdjustedRows
from exactspec.sampling.noise import NoiseStream
from exactspec.sampling.rows import RowGroup
from exactspec.sampling.sampler import Sampler, SampleResult
from exactspec.scheduler.plan import StepPlan
from exactspec.types import ForwardBatch, Proposal, RunningRequest, TokenLogprob
from exactspec.verify.accept import AcceptResult, outcome_sources

TAUGHT_AT_ONCE = 64  # requests


@dataclass(slots=True)
class _Part:
    """One forward's share of a step."""

    blocks: list[Block]
    hidden: Tensor  # [T, H]
    logits: Tensor | None = None
    token_ids: Tensor | None = None  # [N] drawn
    groups: list[RowGroup] = field(default_factory=list)  # cover all N rows; none: a row for each block and draft
    sampled_blocks: list[Block] = field(default_factory=list)
    first_logit_row: list[int] = field(default_factory=list)
    accepted: list[AcceptResult] = field(default_factory=list)
    scored: list[list[TokenLogprob] | None] = field(default_factory=list)


@dataclass(slots=True)
class _CudaFlight:
    """A launched round. Its tensors are valid until the next launch, its slot until the one after."""

    runner: CudaRoundRunner
    requests: list[RunningRequest]
    slot: Slot
    shape: RoundShape
    places: int  # drafts verified in all, at most
    outputs: tuple[Tensor, Tensor, Tensor]  # hidden, logits, token ids

    @property
    def num_rows(self) -> int:
        return self.shape.bucket + self.places

    def read(self, live: Set[RunningRequest]) -> DecodedRound:
        """Without rows: they may be another round's by now, and nobody wants them (`can_launch`)."""
        return self.runner.landed(self, live)[0]


class CudaRoundRunner(RoundRunner):
    """A RoundRunner whose forwards are captured. `most_requests` as the scheduler's; contexts up to the target's.

    Building one runs the backend's self-check on the target's weights: DeviceError if two tiles of a shape disagree.
    """

    postpones = False  # a captured draft reads the draft's K/V alone
    patience = 256  # rounds

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
        self.stage = RoundStage(request_bucket(self.most_requests), pages, drafter.gamma, self.device)
        self._num_taught = 0  # rounds
        self._num_wanted: Counter[Hashable] = Counter()  # rounds, by the graphs that they wanted and that are not there
        self._probs: Tensor | None = None
        if policy.needs_draft_probs and self._by_block:
            self._draft_probs()  # where there is no memory for it, that shows at start
        self._simulated = policy.simulated if isinstance(policy, AcceptByDecree) else None

    def forget(self) -> None:
        self.stage.forget()

    @property
    def _by_block(self) -> bool:
        return isinstance(self.drafter, BlockDrafter)

    @property
    def _drafts_on_device(self) -> bool:
        return self._by_block or not self.drafter.gamma

    def _draft_probs(self) -> Tensor:
        """[R, G, V] float32: what the round's drafts were drawn from. One buffer for all graphs."""
        if self._probs is None:
            shape = (*self.stage.drafts.shape, cast(BlockDrafter, self.drafter).config.vocab_size)
            self._probs = torch.empty(shape, dtype=torch.float32, device=self.device)
        return self._probs

    @property
    def _wants_confidence(self) -> bool:
        return self.policy.reads_confidence and getattr(self.drafter, "confidence_head", None) is not None

    @torch.no_grad()
    def run(self, plan: StepPlan) -> RoundResult:
        if not self._fits(plan):
            return super().run(plan)
        flight = self._launch_decodes(plan.decodes, carried=False)
        prefills = [self._prefill(plan)] if plan.prefills else []  # launched behind, before anything is read
        return self._join([self._decoded(flight), *prefills])

    def can_launch(self, plan: StepPlan) -> bool:
        return (
            self._drafts_on_device
            and not plan.prefills
            and self._fits(plan)
            and all(not needs_rows(request) for request in plan.decodes)
        )

    @torch.no_grad()
    def launch(self, decodes: list[RunningRequest], behind: Flight | None = None) -> Flight:
        return self._launch_decodes(decodes, carried=behind is not None)

    # ---- which way ----------------------------------------------------------------------------------

    def _fits(self, plan: StepPlan) -> bool:
        if not plan.decodes or not self._has_room(plan.decodes):
            return False
        if self.policy.needs_draft_probs and not self._drafts_on_device:
            return False
        return all(is_plain(chunk.request) for chunk in plan.prefills)

    def _has_room(self, decodes: Sequence[RunningRequest]) -> bool:
        """There is a captured round for these requests."""
        fits = len(decodes) <= self.most_requests and max(len(r.pages) for r in decodes) <= self.stage.most_pages
        return fits and all(map(is_plain, decodes))

    def _forward(self, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        return self.forward(batch)

    def _propose(self, decodes: Sequence[RunningRequest]) -> Proposal:
        """By the draft graph where nothing but logits, temperature and noise decide the drafts."""
        by_graph = self._by_block and not self.policy.needs_draft_probs
        if not by_graph or not self._has_room(decodes):
            return super()._propose(decodes)
        requests, count = list(decodes), len(decodes)
        shape = self.stage.seat(requests)
        draft = self._draft_graph(shape.bucket, shape.sampled)
        slot = self.stage.send(requests, carried=False)
        draft.replay()
        self.stage.sent(slot)
        confidence = self.stage.confidence[:count].clone() if self._wants_confidence else None
        lengths = [min(self.drafter.gamma, request.draft_room) for request in requests]
        return Proposal(self.stage.drafts[:count].clone(), lengths, None, confidence)

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
        first_rows = list(range(len(drawn)))
        return _Part(
            blocks, hidden, logits, sampled.token_ids, groups, drawn, first_rows, accepted, [None] * len(drawn)
        )

    # ---- the captured decode round -------------------------------------------------------------------

    def _launch_decodes(self, decodes: list[RunningRequest], carried: bool) -> _CudaFlight:
        """A round with as many drafts as the policy wants. Prefill chunks of the step are a forward of their own."""
        bucket = request_bucket(len(decodes))
        levels = draft_levels(bucket, self.drafter.gamma)
        places = self.policy.drafts_ahead(StepPlan(decodes=decodes), bucket, levels)
        places = self._affordable(self.stage.seat(decodes), places, levels)
        lengths: list[int] | None = None
        if places and not self._by_block:  # the drafts come from the host
            proposal = self._propose(decodes)
            self.stage.drafts[: len(decodes)].copy_(proposal.token_ids)
            lengths = proposal.lengths
        return self._launch(decodes, carried, places, lengths)

    def _affordable(self, shape: RoundShape, places: int, levels: Sequence[int]) -> int:
        """A capture takes as long as tens of rounds. So a number of drafts between none and all that the policy has
        come to by its estimates is captured when they have asked for it in `patience` rounds; until then more are
        verified."""
        if places in (0, levels[-1]) or not self.policy.learns:
            return places
        key = self._verify_key(shape, places)
        if self.graphs.has("verify", key) or self._num_wanted[key] >= self.patience:
            return places
        self._num_wanted[key] += 1
        more = [level for level in levels if places < level < levels[-1]]
        return next((n for n in more if self.graphs.has("verify", self._verify_key(shape, n))), levels[-1])

    def _launch(
        self, decodes: list[RunningRequest], carried: bool, places: int, lengths: list[int] | None
    ) -> _CudaFlight:
        shape = self.stage.seat(decodes)
        verify = self._verify_graph(shape, places)
        draft = None
        if places and self._by_block:
            draft = self._draft_graph(shape.bucket, shape.sampled, self._rejects(shape))
        slot = self.stage.send(decodes, carried, lengths, self._decrees(decodes, carried))
        timed = self.policy.learns
        if timed:
            slot.mark()
        if draft is not None:
            draft.replay()
        if timed:
            slot.mark()
        outputs = verify.replay()
        if timed:
            slot.mark()
        flight = _CudaFlight(self, decodes, slot, shape, places, outputs)
        self.stage.fetch(slot, shape, flight.num_rows)
        return flight

    def _decrees(self, decodes: list[RunningRequest], carried: bool) -> int | list[int]:
        """Accepted drafts by decree; -1 where draws decide. A carried round is one further than its request knows."""
        if self._simulated is None:
            return -1
        count, gamma = self._simulated.num_accepted, self.drafter.gamma
        return [count(r.request.request_id, r.stats.rounds + carried, gamma) for r in decodes]

    def landed(self, flight: _CudaFlight, live: Set[RunningRequest]) -> tuple[DecodedRound, np.ndarray]:
        """What the read-back means for the requests that are still there, and its rows for them as `judge` has filled
        them: the host only cuts and counts."""
        gamma, requests, wanted = self.drafter.gamma, flight.requests, flight.shape.wanted
        results, scores = self.stage.read(flight.slot, flight.shape, flight.num_rows)
        results = results[: len(requests)]
        if self.policy.learns:
            self._teach(flight, results)
        kept = [row for row, request in enumerate(requests) if request in live]
        if len(kept) < len(requests):
            requests, wanted = [requests[row] for row in kept], [wanted[row] for row in kept]
            results = results[kept]
        accepted = results[:, Column.ACCEPTED].tolist()
        may_emit = results[:, DRAFTS + gamma : DRAFTS + 2 * gamma + 1].tolist()
        decoded = DecodedRound(
            requests,
            tokens=[tokens[: count + 1] for tokens, count in zip(may_emit, accepted, strict=True)],
            accepted=accepted,
            verified=results[:, Column.VERIFIED].tolist(),
            drafted=results[:, Column.PROPOSED].tolist() if flight.places else [0] * len(requests),
            scored=[None] * len(requests),
        )
        if scores is not None:
            decoded.scored = _entries(decoded, results[:, Column.FIRST_ROW].tolist(), scores, wanted)
        return decoded, results

    def _decoded(self, flight: _CudaFlight) -> _Part:
        """The round as the ordinary path would tell of it, rows and all; to be read before the next is launched."""
        decoded, results = self.landed(flight, set(flight.requests))
        num_rows = int(results[-1, Column.FIRST_ROW] + results[-1, Column.VERIFIED]) + 1
        hidden, logits, token_ids = flight.outputs
        part = _Part([], hidden[:num_rows], logits[:num_rows], token_ids[:num_rows], scored=decoded.scored)
        part.first_logit_row = results[:, Column.FIRST_ROW].tolist()
        drafts = results[:, DRAFTS : DRAFTS + self.drafter.gamma].tolist()
        for row, (request, count, length) in enumerate(
            zip(decoded.requests, decoded.accepted, decoded.verified, strict=True)
        ):
            verified, first = drafts[row][:length], part.first_logit_row[row]
            rows = [request.token_ids[-1], *verified]
            part.blocks.append(
                Block(request, request.kv_len, rows, len(rows), verified, decoded.drafted[row], False, first)
            )
            part.accepted.append(AcceptResult(count, decoded.tokens[row], outcome_sources(count, length)))
        part.sampled_blocks = part.blocks
        return part

    def _teach(self, flight: _CudaFlight, results: np.ndarray) -> None:
        """Tells the policy what came of the round, and what it took. Of a large batch, of some requests in turn."""
        gamma, count = self.drafter.gamma, len(flight.requests)
        self._num_taught += 1
        if flight.places:
            shares = -(-count // TAUGHT_AT_ONCE)
            told = results[self._num_taught % shares :: shares]
            survival = None
            if self._wants_confidence:
                bits = told[:, DRAFTS + 2 * gamma + 1 :].astype(np.int32)
                survival = bits.view(np.float32).astype(np.float64)
            verified, accepted = told[:, Column.VERIFIED].tolist(), told[:, Column.ACCEPTED].tolist()
            self.policy.note_round(survival, verified, accepted)
        took = flight.slot.part_seconds()
        if took is not None:
            self.policy.note_times(flight.num_rows, took[1], count if flight.places else 0, took[0])

    def _draft_graph(self, bucket: int, sampled: bool, rejects: bool = False) -> Replay:
        return self.graphs.get("draft", (bucket, sampled, rejects), lambda: self._draft(bucket, sampled, rejects))

    def _verify_graph(self, shape: RoundShape, places: int) -> Replay:
        key = self._verify_key(shape, places)
        return self.graphs.get("verify", key, lambda: self._verify(*key))

    def _verify_key(self, shape: RoundShape, places: int) -> tuple[int, bool, int | None, int, bool]:
        return shape.bucket, shape.sampled, shape.top, places, self._rejects(shape)

    def _rejects(self, shape: RoundShape) -> bool:
        """Greedy drafts and draws are one-hot: there both rules of acceptance are one."""
        return shape.sampled and self.policy.needs_draft_probs and self._by_block

    def _draft(self, bucket: int, sampled: bool, rejects: bool) -> None:
        drafter = cast(BlockDrafter, self.drafter)
        inputs = self._inputs(bucket, first=True)
        rows = draft_rows(inputs, drafter.num_rows, self.page_size, drafter.config.mask_token_id)
        hidden = drafter.predict(rows.batch)
        noise, drafts = (inputs.temperatures, inputs.seeds, inputs.output_positions), self.stage.drafts[:bucket]
        if rejects:
            probs = self._draft_probs()[:bucket]
            draw_block_with_probs(drafter, hidden, inputs.anchors, noise, drafts, probs, self.sampler.valid_vocab)
        else:
            draw_block(drafter, hidden, inputs.anchors, noise if sampled else None, drafts, self.sampler.valid_vocab)
        if self._wants_confidence:
            head, stage = cast(ConfidenceHead, drafter.confidence_head).proj, self.stage
            block_confidence(
                hidden, inputs.anchors, stage.drafts[:bucket], drafter.drawer.w1, head.weight, head.bias,
                drafter.confidence_scales, inputs.temperatures, stage.confidence[:bucket], stage.survival[:bucket],
            )  # fmt: skip

    def _verify(
        self, bucket: int, sampled: bool, top: int | None, places: int, rejects: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        stage, num_rows = self.stage, bucket + places
        inputs = self._inputs(bucket, first=not (places and self._by_block))
        drafts, survival = stage.drafts[:bucket], stage.survival[:bucket]
        lens = share_places(stage.message, inputs, survival, places)
        rows = verify_rows(inputs, lens, drafts, num_rows, self.page_size)
        hidden, captured = self.target.forward(rows.batch, self.pool, self.drafter.capture_layers)
        self.drafter.observe(rows.batch, captured)
        logits = self.target.logits(hidden)
        temperatures = rows.temperatures if sampled else None
        stream, valid = int(NoiseStream.TARGET), self.sampler.valid_vocab
        token_ids, _, _ = sampling.draw(logits, temperatures, rows.seeds, rows.output_positions, stream, valid)
        results, q_start = stage.results(bucket), rows.batch.q_start
        if rejects and places:
            verified = VerifiedRows(logits, token_ids, rows.temperatures, q_start[:-1].long(), lens, valid)
            token_ids, drafts = reject(verified, inputs, drafts, self._draft_probs()[:bucket])
        scored = judge(
            stage.message, inputs, stage.seats, drafts, survival, lens, q_start, token_ids, results, top is not None
        )
        if top is not None and scored is not None:
            emitted, divisors = scored
            packed = stage.scores(bucket, num_rows, top)
            pack_scores(logits, emitted, top, valid, self.sampler.ops, divisors, packed)
        return hidden, logits, token_ids

    def _inputs(self, bucket: int, first: bool) -> RoundInputs:
        """The bucket's inputs, made from the message by the round's first graph. In the run before a capture all are
        inactive, so that it writes no K/V and leaves the seats alone."""
        inputs = self.stage.inputs.first(bucket)
        if first:
            take_seats(self.stage.message, self.stage.seats, inputs)
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
        scored = [entries for part in parts for entries in part.scored]
        reads = any(_reads_logits(*pair) for pair in zip(sampled_blocks, scored, strict=True))
        sampled = self._sampled(parts) if reads else None
        return RoundResult(
            blocks=[block for part in parts for block in part.blocks],
            hidden=hidden,
            logits=None if sampled is None else sampled.logits,
            sampled=sampled,
            sampled_blocks=sampled_blocks,
            first_logit_row=[first for part in parts for first in part.first_logit_row],
            accepted=[accepted for part in parts for accepted in part.accepted],
            scored=scored,
        )

    def _sampled(self, parts: list[_Part]) -> SampleResult:
        drawn = [part for part in parts if part.logits is not None]
        logits = [part.logits for part in drawn if part.logits is not None]
        token_ids = [part.token_ids for part in drawn if part.token_ids is not None]
        groups = [
            group
            for part in drawn
            for group in part.groups or [RowGroup(b.request, b.request.num_output, b.drafts) for b in part.blocks]
        ]
        adjusted = AdjustedRows(logits[0] if len(logits) == 1 else torch.cat(logits))
        result = SampleResult(adjusted, groups, self.sampler.valid_vocab, self.sampler.backend)
        result.token_ids = token_ids[0] if len(token_ids) == 1 else torch.cat(token_ids)
        return result


def _reads_logits(block: Block, entries: list[TokenLogprob] | None) -> bool:
    request = block.request
    return request.request.sampling_mask is not None or (entries is None and request.params.logprobs is not None)


def _entries(
    decoded: DecodedRound, first_rows: list[int], scores: np.ndarray, wanted: list[int | None]
) -> list[list[TokenLogprob] | None]:
    """Logprob entries of what each request may emit. first_rows: of the requests, among those of scores;
    wanted: alternatives (None: no entries)."""
    scored: list[list[TokenLogprob] | None] = [None] * len(wanted)
    rows: list[int] = []
    tokens: list[int] = []
    counts: list[int] = []
    asked: list[tuple[int, int]] = []  # request, its end among the rows
    for number, (first, emitted, top) in enumerate(zip(first_rows, decoded.tokens, wanted, strict=True)):
        if top is not None:
            rows.extend(range(first, first + len(emitted)))
            tokens.extend(emitted)
            counts.extend([top] * len(emitted))
            asked.append((number, len(rows)))
    entries = unpack_scores(scores[rows], tokens, counts)
    start = 0
    for number, end in asked:
        scored[number] = entries[start:end]
        start = end
    return scored
