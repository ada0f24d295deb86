"""Block drafts over paged K/V, against the slow reference without pages or cache.

The target is the random three-layer one of tests/fakes.py, float32, on the plain-torch and on the native CPU backend.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from draft_fakes import draft_config, draft_tensors, reference_chain, reference_hidden, running, write_draft
from fakes import make_batch, tiny_target
from torch import Tensor

from exactspec.backend.cpu.backend import CpuBackend
from exactspec.backend.torch_ref.backend import TorchBackend
from exactspec.draft.base import DraftBatch
from exactspec.draft.block import BlockDrafter
from exactspec.draft.calibration import Calibration, PositionScales, calibrated_chances
from exactspec.draft.checkpoint import load_block_model
from exactspec.errors import ConfigError
from exactspec.model.target import TargetModel
from exactspec.sampling.noise import NoiseStream
from exactspec.types import Proposal, RunningRequest

PAGE = 4
NUM_SLOTS = 256
DSPARK = draft_config()
DFLASH = draft_config(
    architectures=["LlamaDFlashModel"], anchor_is_first_prediction=False, markov_rank=0, enable_confidence_head=False
)
LAYOUTS = {
    "dspark": DSPARK,
    "dflash": DFLASH,
    "gated": draft_config(markov_head_type="gated"),
    "rnn": draft_config(markov_head_type="rnn"),
    "qwen3": draft_config(model_type="qwen3", head_dim=32, attention_bias=True),
}
TEXT = [5, 80, 33, 120, 7, 7, 91, 14, 200, 3, 64, 18]


@pytest.fixture(scope="module", params=[TorchBackend, CpuBackend])
def target(request) -> TargetModel:
    return TargetModel(request.param(), tiny_target(num_layers=3))


class Harness:
    """A drafter on `target`, fed by real target forwards over pages that each request is given."""

    def __init__(self, target: TargetModel, config: dict, folder, page_size: int = PAGE, **arguments) -> None:
        self.target, self.config, self.page_size = target, config, page_size
        self.weights = draft_tensors(config)
        self.model = load_block_model(write_draft(folder, config, self.weights))
        self.drafter = BlockDrafter(self.model, target, NUM_SLOTS, **arguments)
        self.pool = target.make_pool(NUM_SLOTS)
        self.next_page = 1  # page 0 stays foreign: nothing may be written there

    def give_pages(self, request: RunningRequest, extra: int = 50) -> RunningRequest:
        count = -(-(len(request.token_ids) + extra) // self.page_size)
        request.pages = list(range(self.next_page + count - 1, self.next_page - 1, -1))
        self.next_page += count
        return request

    def feed(self, request: RunningRequest, start: int, end: int) -> None:
        """Target forward and observe over positions start .. end - 1."""
        batch = make_batch([(start, request.token_ids[start:end])], self.page_size, [request.pages])
        _, captured = self.target.forward(batch, self.pool, self.drafter.capture_layers)
        self.drafter.observe(batch, captured)

    def ready(self, request: RunningRequest, pieces: tuple[int, ...] = ()) -> RunningRequest:
        """Give pages and feed everything before the anchor, cut at `pieces`."""
        self.give_pages(request)
        borders = [0, *pieces, len(request.token_ids) - 1]
        for start, end in pairwise(borders):
            self.feed(request, start, end)
        return request

    def propose(self, *requests: RunningRequest, **arguments) -> Proposal:
        width = max(len(r.pages) for r in requests)
        return self.drafter.propose(
            DraftBatch(
                requests=requests,
                anchor_ids=torch.tensor([r.token_ids[-1] for r in requests]),
                anchor_positions=torch.tensor([len(r.token_ids) - 1 for r in requests], dtype=torch.int32),
                page_table=torch.tensor([r.pages + [0] * (width - len(r.pages)) for r in requests], dtype=torch.int32),
                page_size=self.page_size,
                max_kv_len=max(len(r.token_ids) - 1 for r in requests),
                **arguments,
            )
        )

    def features(self, tokens: list[int]) -> Tensor:
        """Target features of all tokens but the last, from one plain pass of their own."""
        batch = make_batch([(0, tokens[:-1])], self.page_size)
        pool = self.target.make_pool(NUM_SLOTS)
        return self.target.forward(batch, pool, self.drafter.capture_layers)[1]

    def base(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Reference (hidden [G, H], base logits [G, V]) for the block after `tokens`."""
        config = self.config
        ids = torch.tensor([tokens[-1]] + [config["mask_token_id"]] * (config["block_size"] - 1))
        hidden = reference_hidden(self.weights, config, self.features(tokens), self.target.embed(ids), len(tokens) - 1)
        hidden = hidden if config["anchor_is_first_prediction"] else hidden[1:]
        return hidden, self.target.logits(hidden)

    def reference(self, tokens: list[int]) -> tuple[list[int], list[float] | None]:
        hidden, base = self.base(tokens)
        return reference_chain(self.weights, self.config, hidden, base, tokens[-1])


def check(proposal: Proposal, row: int, expected: tuple[list[int], list[float] | None]) -> None:
    tokens, confidences = expected
    assert proposal.lengths[row] == len(tokens)
    assert proposal.token_ids[row].tolist() == tokens
    if confidences is None:
        assert proposal.confidence is None
    else:
        torch.testing.assert_close(proposal.confidence[row], torch.tensor(confidences), rtol=0, atol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 4])
def test_drafts_equal_the_reference_in_a_ragged_batch(layout, page_size, target, tmp_path):
    harness = Harness(target, LAYOUTS[layout], tmp_path, page_size)
    requests = [harness.ready(running(TEXT[:length], request_id=str(length))) for length in (12, 2, 7)]
    proposal = harness.propose(*requests)
    for row, request in enumerate(requests):
        check(proposal, row, harness.reference(request.token_ids))


@pytest.mark.parametrize("pieces", [(1,), (4,), (3, 5, 9), tuple(range(1, 11))])
def test_context_written_in_pieces_is_the_context_written_at_once(pieces, target, tmp_path):
    harness = Harness(target, DSPARK, tmp_path)
    whole = harness.ready(running(TEXT, request_id="whole"))
    cut = harness.ready(running(TEXT, request_id="cut"), pieces)
    proposal = harness.propose(whole, cut)
    assert torch.equal(proposal.token_ids[0], proposal.token_ids[1])
    for tensor in (harness.drafter.pool.k, harness.drafter.pool.v):
        rows = []
        for request in (whole, cut):
            positions = range(len(TEXT) - 1)
            slots = [request.pages[p // PAGE] * PAGE + p % PAGE for p in positions]
            rows.append(tensor[:, slots])
        assert torch.equal(rows[0], rows[1])


@pytest.mark.parametrize("backend", [TorchBackend, CpuBackend])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_context_learnt_late_has_the_bits_of_context_learnt_at_once(backend, dtype, tmp_path):
    """Two requests share their first page; each is postponed in other pieces, and one of them is learnt in between."""
    target = TargetModel(backend(), tiny_target(num_layers=3, dtype=dtype))
    harness = Harness(target, DSPARK, tmp_path)
    at_once = harness.propose(harness.ready(running(TEXT)), harness.ready(running(TEXT[:7], request_id="short")))
    observe, harness.drafter.observe = harness.drafter.observe, harness.drafter.postpone
    long = harness.ready(running(TEXT, request_id="late"), (2, 5))
    short = harness.give_pages(running(TEXT[:7], request_id="late and short"))
    short.pages[0] = long.pages[0]
    harness.feed(short, 4, 5)
    harness.drafter.observe = observe
    harness.feed(short, 5, 6)
    late = harness.propose(long, short)
    assert torch.equal(late.token_ids, at_once.token_ids)
    assert torch.equal(late.confidence, at_once.confidence)
    assert harness.drafter.catch_up_seconds > 0.0


def test_a_request_that_comes_back_to_other_pages_is_caught_up_again(target, tmp_path):
    """It was drafted for, retracted, and finds its text on pages of another request, which nobody has drafted for."""
    harness = Harness(target, DSPARK, tmp_path)
    drafter = harness.drafter
    drafter.observe, observe = drafter.postpone, drafter.observe
    request, other = harness.ready(running(TEXT)), harness.ready(running(TEXT, request_id="other"))
    drafter.observe = observe
    before = harness.propose(request)
    request.pages, request.stats.num_retracted = other.pages, 1
    after = harness.propose(request)
    assert torch.equal(after.confidence, before.confidence)
    drafter.forget(request)
    assert torch.equal(harness.propose(request).confidence, before.confidence)


def test_rounds_overwrite_what_rejected_rows_left_behind(target, tmp_path):
    """Accept 0, some and all drafts in turn: after each round the draft is that of a fresh start on the same text."""
    harness = Harness(target, DSPARK, tmp_path)
    request = harness.ready(running(TEXT, max_new=60))
    for accepted in (0, 2, 5, 1, 0, 4):
        drafts = harness.propose(request).token_ids[0].tolist()
        anchor_at = len(request.token_ids) - 1
        verified = RunningRequest(request.request, request.token_ids + drafts, pages=request.pages)
        harness.feed(verified, anchor_at, anchor_at + 1 + len(drafts))  # rejected rows are observed too
        request.token_ids += [*drafts[:accepted], (drafts[accepted - 1] * 7 + 11) % 250]
        check(harness.propose(request), 0, harness.reference(request.token_ids))


def test_positions_after_a_prefix_hit(target, tmp_path):
    """A second request takes two full pages of the first from the cache and computes the rest itself."""
    harness = Harness(target, DSPARK, tmp_path)
    first = harness.ready(running(TEXT, request_id="first"))
    tokens = [*TEXT[: 2 * PAGE], 44, 45, 46]
    second = harness.give_pages(running(tokens, request_id="second"))
    second.pages = first.pages[:2] + second.pages[2:]
    harness.feed(second, 2 * PAGE, len(tokens) - 1)
    check(harness.propose(first, second), 1, harness.reference(tokens))
    # the whole prompt but the anchor is a hit
    third = harness.give_pages(running(TEXT[: 2 * PAGE + 1], request_id="third"))
    third.pages = first.pages[:2] + third.pages[2:]
    check(harness.propose(third), 0, harness.reference(third.token_ids))


def test_nothing_is_written_outside_the_own_pages(target, tmp_path):
    harness = Harness(target, DFLASH, tmp_path)
    first, second = (harness.ready(running(TEXT[:n], request_id=str(n))) for n in (12, 5))
    before = harness.drafter.pool.k.clone()
    harness.propose(second)
    changed = (harness.drafter.pool.k != before).flatten(2).any(-1).any(0).nonzero()[:, 0]
    pages = {int(slot) // PAGE for slot in changed}
    assert pages <= set(second.pages)
    assert not pages & set(first.pages)


def test_lengths_follow_the_room_that_a_request_has(target, tmp_path):
    harness = Harness(target, DSPARK, tmp_path)
    roomy, tight, full = (harness.ready(running(TEXT, request_id=str(n), max_new=n)) for n in (60, 4, 1))
    proposal = harness.propose(roomy, tight, full)
    assert proposal.lengths == [5, 2, 0]
    check_tokens, _ = harness.reference(TEXT)
    assert proposal.token_ids[0].tolist() == check_tokens
    assert proposal.token_ids[1, :2].tolist() == check_tokens[:2]
    assert harness.propose(full).lengths == [0]


@pytest.mark.parametrize("gamma", [1, 3])
def test_a_shorter_gamma_drafts_fewer_tokens(gamma, target, tmp_path):
    for config in (DSPARK, DFLASH):
        harness = Harness(target, config, tmp_path / config["architectures"][0], gamma=gamma)
        request = harness.ready(running(TEXT))
        assert harness.drafter.gamma == gamma
        assert harness.propose(request).token_ids.shape == (1, gamma)


@pytest.mark.parametrize("gamma", [0, -1, 6])
def test_gamma_beyond_the_trained_block_is_refused(gamma, target, tmp_path):
    with pytest.raises(ConfigError, match="gamma: must be from 1 to 5"):
        Harness(target, DSPARK, tmp_path, gamma=gamma)


def coupled_reference(harness: Harness, request: RunningRequest) -> list[int]:
    """argmax(logits / T + g) with the target's noise, left to right, whole vocabulary, vanilla head."""
    hidden, base = harness.base(request.token_ids)
    w1 = harness.weights["markov_head.markov_w1.weight"]
    w2 = harness.weights["markov_head.markov_w2.weight"]
    before, tokens = request.token_ids[-1], []
    for k in range(len(hidden)):
        seed, position = torch.tensor([request.request.seed]), torch.tensor([request.num_output + k])
        noise = harness.target.backend.gumbel(seed, position, int(NoiseStream.TARGET), base.shape[-1])[0]
        before = int(((base[k] + w2 @ w1[before]) / request.params.temperature + noise).argmax())
        tokens.append(before)
    return tokens


def test_sampled_drafts_use_the_targets_noise_beside_greedy_ones(target, tmp_path):
    harness = Harness(target, DSPARK, tmp_path)
    greedy = harness.ready(running(TEXT[:8], request_id="greedy"))
    warm = harness.ready(running(TEXT, prompt_len=9, request_id="warm", temperature=0.7, seed=3))
    hot = harness.ready(running(TEXT[:5], request_id="hot", temperature=1.5, seed=-4))
    proposal = harness.propose(warm, greedy, hot)
    assert proposal.token_ids[0].tolist() == coupled_reference(harness, warm)
    assert proposal.token_ids[2].tolist() == coupled_reference(harness, hot)
    check(proposal, 1, harness.reference(greedy.token_ids))


def test_filters_narrow_the_draft_as_they_narrow_the_target(target, tmp_path):
    harness = Harness(target, DSPARK, tmp_path)
    greedy = harness.ready(running(TEXT, request_id="greedy"))
    only = harness.ready(running(TEXT, request_id="only", temperature=1.0, top_k=1))
    proposal = harness.propose(greedy, only)
    assert torch.equal(proposal.token_ids[0], proposal.token_ids[1])


def test_asked_for_probabilities_are_those_of_the_draw(target, tmp_path):
    """q is softmax(logits / T), filtered; draws over many seeds follow it. False alarm odds of the count test: 1e-6."""
    harness = Harness(target, DSPARK, tmp_path)
    base_request = harness.ready(running(TEXT, temperature=1.3, top_k=4))
    trials = 400
    requests = []
    for seed in range(trials):
        request = running(TEXT, request_id=str(seed), temperature=1.3, top_k=4, seed=seed)
        request.pages = base_request.pages
        requests.append(request)
    proposal = harness.propose(*requests, want_probs=True)
    assert proposal.probs.shape == (trials, 5, 262)
    _, base = harness.base(TEXT)
    w1, w2 = harness.weights["markov_head.markov_w1.weight"], harness.weights["markov_head.markov_w2.weight"]
    expected = (base[0] + w2 @ w1[TEXT[-1]]) / 1.3
    expected = expected.masked_fill(expected < expected.topk(4).values[-1], float("-inf")).softmax(-1)
    torch.testing.assert_close(proposal.probs[0, 0], expected, rtol=0, atol=1e-4)
    drawn = torch.bincount(proposal.token_ids[:, 0], minlength=262)
    for token in expected.nonzero()[:, 0].tolist():
        p = float(expected[token])
        spread = (trials * p * (1 - p)) ** 0.5
        assert abs(int(drawn[token]) - trials * p) <= 5.2 * spread + 1
    assert int(drawn[expected > 0].sum()) == trials
    assert bool((proposal.probs.gather(2, proposal.token_ids[:, :, None]) > 0).all())
    torch.testing.assert_close(proposal.probs.sum(-1), torch.ones(trials, 5))


def test_greedy_probabilities_are_one_hot(target, tmp_path):
    harness = Harness(target, DSPARK, tmp_path)
    request = harness.ready(running(TEXT))
    proposal = harness.propose(request, want_probs=True)
    check(proposal, 0, harness.reference(TEXT))
    assert torch.equal(proposal.probs[0], torch.nn.functional.one_hot(proposal.token_ids[0], 262).float())


def test_adjusted_logits_decide_and_see_the_draft_so_far(target, tmp_path):
    harness = Harness(target, DSPARK, tmp_path)
    request = harness.ready(running(TEXT))
    seen = []

    def forbid_repeats(k: int, logits: Tensor, before: Tensor) -> Tensor:
        assert before.shape == (1, k)
        seen.append(before[0].tolist())
        return logits.scatter(1, before, float("-inf")).index_fill(1, torch.tensor([free[0]]), float("-inf"))

    free = harness.propose(request).token_ids[0].tolist()
    tokens = harness.propose(request, adjust=forbid_repeats).token_ids[0].tolist()
    assert free[0] not in tokens
    assert len(set(tokens)) == len(tokens)
    assert seen == [tokens[:k] for k in range(5)]


def test_shared_noise_rows_give_the_same_drafts(target, tmp_path):
    harness = Harness(target, DSPARK, tmp_path)
    request = harness.ready(running(TEXT, temperature=0.9, seed=12))
    asked = []

    def rows(seeds, positions, stream):
        asked.append((list(seeds), list(positions), stream))
        pairs = torch.tensor([list(seeds), list(positions)])
        return target.backend.gumbel(pairs[0], pairs[1], int(stream), 262)

    shared = harness.propose(request, noise=rows)
    assert asked == [([12] * 5, [1, 2, 3, 4, 5], NoiseStream.TARGET)]
    assert torch.equal(shared.token_ids, harness.propose(request).token_ids)


@pytest.mark.parametrize(("temperature", "share"), [(0.0, 0.0), (0.5, 0.5), (1.0, 1.0), (1.7, 1.0)])
def test_calibration_scales_confidence_logits_by_the_requests_temperature(target, tmp_path, temperature, share):
    greedy = PositionScales((1.0, 2.0, 0.5, 4.0, 1.5), (0.0, 0.1, 0.2, 0.3, 0.4))
    sampled = PositionScales((2.0, 1.0, 1.5, 1.0, 0.5), (-0.5, 0.0, -0.2, 0.3, 0.0))
    calibration = Calibration(greedy, sampled)
    plain = Harness(target, DSPARK, tmp_path / "plain")
    warm = Harness(target, DSPARK, tmp_path / "warm", calibration=calibration)
    assert (plain.drafter.calibrated, warm.drafter.calibrated) == (False, True)
    raw = plain.propose(plain.ready(running(TEXT, temperature=temperature))).confidence
    found = warm.propose(warm.ready(running(TEXT, temperature=temperature))).confidence[0]

    def mixed(a, b):
        return (1 - share) * torch.tensor(a) + share * torch.tensor(b)

    slope = mixed([1 / t for t in greedy.temperatures], [1 / t for t in sampled.temperatures])
    expected = torch.sigmoid(torch.logit(raw[0]) * slope + mixed(greedy.offsets, sampled.offsets))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    again = calibrated_chances(raw.numpy(), calibration, [temperature])
    torch.testing.assert_close(found, torch.from_numpy(again[0]).float(), rtol=0, atol=1e-5)


def test_confidence_that_nobody_reads_is_not_made(target, tmp_path):
    harness = Harness(target, DSPARK, tmp_path)
    request = harness.ready(running(TEXT))
    asked, unasked = harness.propose(request), harness.propose(request, want_confidence=False)
    assert asked.confidence is not None
    assert unasked.confidence is None
    assert torch.equal(asked.token_ids, unasked.token_ids)


def test_own_embedding_and_head_are_used_where_present(target, tmp_path):
    """The same numbers as the target's, shipped inside the draft: the same drafts; other numbers: others."""
    shared = Harness(target, DSPARK, tmp_path / "shared")
    request = shared.ready(running(TEXT))
    ids = torch.arange(262)
    embed = target.embed(ids)
    head = target.logits(torch.eye(32)).T.contiguous()
    for scale, same in ((1.0, True), (-1.0, False)):
        weights = {**draft_tensors(DSPARK), "embed_tokens.weight": embed, "lm_head.weight": head * scale}
        model = load_block_model(write_draft(tmp_path / str(scale), DSPARK, weights))
        own = BlockDrafter(model, target, NUM_SLOTS)
        own.pool = shared.drafter.pool
        drafts = shared.propose(request).token_ids
        shared_drafter, shared.drafter = shared.drafter, own
        assert torch.equal(shared.propose(request).token_ids, drafts) is same
        shared.drafter = shared_drafter


@pytest.mark.parametrize("layout", ["dspark", "dflash"])
def test_a_short_vocabulary_limits_proposals_and_nothing_else(layout, target, tmp_path):
    """Tokens of the usual drafts in the list: the same drafts. One left out: the best of the others takes its place."""
    config = LAYOUTS[layout]
    harness = Harness(target, config, tmp_path / "whole")
    requests = [harness.ready(running(TEXT, request_id="a")), harness.ready(running(TEXT[:7], request_id="b"))]
    warm = harness.ready(running(TEXT[:9], request_id="c", temperature=0.8, seed=3))
    whole = harness.propose(*requests, warm)
    used = set(whole.token_ids.flatten().tolist())
    kept = sorted(used | set(range(0, 262, 3)))
    short = Harness(target, config, tmp_path / "short", short_vocab=kept)
    short.drafter.pool = harness.drafter.pool
    same = short.propose(*requests, warm)
    assert torch.equal(same.token_ids, whole.token_ids)
    first = int(whole.token_ids[0, 0])
    without = [token for token in kept if token != first]
    short = Harness(target, config, tmp_path / "without", short_vocab=without)
    short.drafter.pool = harness.drafter.pool
    drafts = short.propose(requests[0]).token_ids[0].tolist()
    assert drafts[0] != first
    assert set(drafts) <= set(without)
    # what needs every token gets every token
    assert torch.equal(short.propose(requests[0], want_probs=True).token_ids[0], whole.token_ids[0])
    assert torch.equal(short.propose(requests[0], adjust=lambda k, row, _: row).token_ids[0], whole.token_ids[0])
