"""Acceptance: stories with known ends, the edges of the coin, and exact joint distributions."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampling.row_fakes import HashBackend, chi_square, chi_square_limit, make_group

from exactspec.sampling.noise import NoiseStream
from exactspec.sampling.sampler import Sampler
from exactspec.types import SamplingParams, TokenSource
from exactspec.verify.accept import accept_coupled, accept_rejection, accepts, residual_weights

PLAIN, ACCEPTED, CORRECTION, BONUS = TokenSource.PLAIN, TokenSource.ACCEPTED, TokenSource.CORRECTION, TokenSource.BONUS


def test_nothing_everything_and_something_is_accepted():
    groups = [make_group(drafts=d) for d in ([5, 6, 7], [5, 6, 7], [5, 6, 7], [5, 6, 7], [])]
    drawn = [9, 6, 7, 1, 5, 6, 7, 8, 5, 4, 7, 8, 5, 6, 2, 8, 3]
    results = accept_coupled(torch.tensor(drawn), groups)
    assert [r.num_accepted for r in results] == [0, 3, 1, 2, 0]
    assert [r.tokens for r in results] == [[9], [5, 6, 7, 8], [5, 4], [5, 6, 2], [3]]
    assert [r.sources for r in results] == [
        [CORRECTION],
        [ACCEPTED, ACCEPTED, ACCEPTED, BONUS],
        [ACCEPTED, CORRECTION],
        [ACCEPTED, ACCEPTED, CORRECTION],
        [PLAIN],
    ]
    assert accept_coupled(drawn, groups) == results


def test_rows_that_do_not_match_are_refused():
    with pytest.raises(ValueError, match="expected 4 rows, got 3"):
        accept_coupled([1, 2, 3], [make_group(drafts=[1, 2, 3])])


@given(
    drawn=st.lists(st.integers(0, 2), min_size=1, max_size=9),
    drafts=st.lists(st.integers(0, 2), min_size=0, max_size=8),
)
def test_coupled_commits_the_draws_up_to_the_first_difference(drawn, drafts):
    drafts = drafts[: len(drawn) - 1]
    (result,) = accept_coupled(drawn[: len(drafts) + 1], [make_group(drafts=drafts)])
    assert result.tokens == drawn[: result.num_accepted + 1]
    assert result.tokens[:-1] == drafts[: result.num_accepted]
    assert result.num_accepted == len(drafts) or drafts[result.num_accepted] != result.tokens[-1]
    assert len(result.sources) == len(result.tokens)


# ---- the coin of rejection acceptance ----------------------------------------------------------------


def test_a_token_without_probability_never_passes_and_a_likelier_one_always():
    coins = torch.tensor([0.0, 5e-324, 0.5, 1 - 2.0**-24, 1 - 2.0**-53], dtype=torch.float64)
    tiny = 1e-45  # the smallest float32
    for q in (tiny, 1e-7, 0.3, 1.0):
        assert not accepts(torch.zeros(5), torch.full((5,), q), coins).any()
        assert accepts(torch.full((5,), q), torch.full((5,), q), coins).all()
        assert accepts(torch.ones(5), torch.full((5,), q), coins).all()
    assert accepts(torch.full((5,), tiny), torch.ones(5), coins).tolist() == [True, True, False, False, False]
    assert not accepts(torch.zeros(5, dtype=torch.bfloat16), torch.ones(5, dtype=torch.bfloat16), coins).any()


def test_the_residual_holds_only_tokens_that_the_draft_underrates():
    p = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5], [0.25, 0.25, 0.5]])
    q = torch.tensor([[0.5, 0.0, 0.5], [0.2, 0.3, 0.5], [0.0, 0.5, 0.5]])
    weights = residual_weights(p, q)
    assert weights[0].tolist() == [0.0, 0.5, 0.0]  # all mass at one token
    assert torch.equal(weights[1], p[1])  # nothing left: back to p
    assert weights[2].tolist() == [0.25, 0.0, 0.0]


def test_one_ulp_of_residual_is_used_and_never_a_token_with_p_zero():
    p = torch.tensor([[0.5, 0.5, 0.0]])
    q = torch.nextafter(p, torch.ones_like(p))
    assert torch.equal(residual_weights(p, q), p)
    q[0, 1] = 0.5 - 2.0**-25
    assert residual_weights(p, q)[0].nonzero().flatten().tolist() == [1]


def greedy_result(logits, groups):
    return Sampler(HashBackend(), logits.shape[1], logits.shape[1], ()).sample(logits, groups)


def test_rejection_on_greedy_rows_is_the_comparison_of_tokens():
    logits = torch.full((4, 6), -1.0)
    logits[range(4), [2, 3, 4, 5]] = 1.0
    for drafts, accepted, tokens in [([2, 3, 4], 3, [2, 3, 4, 5]), ([2, 1, 4], 1, [2, 3]), ([0, 3, 4], 0, [2])]:
        groups = [make_group(drafts=drafts, temperature=0.0)]
        (result,) = accept_rejection(greedy_result(logits, groups), groups, None)
        assert (result.num_accepted, result.tokens) == (accepted, tokens)
        assert result == accept_coupled(greedy_result(logits, groups).token_ids, groups)[0]


def test_filtered_drafts_are_never_accepted_nor_drawn():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0]).expand(2, 4)
    for seed in range(300):
        groups = [make_group(seed=seed, top_k=2, drafts=[3])]
        q = torch.full((1, 4), 0.25)
        (result,) = accept_rejection(greedy_result(logits, groups), groups, [q])
        assert result.num_accepted == 0
        assert result.tokens[0] in (0, 1)


def test_plain_groups_keep_the_draw_of_the_target():
    logits = torch.randn(3, 6)
    groups = [make_group(seed=4, drafts=[1]), make_group(seed=5)]
    sampled = greedy_result(logits, groups)
    results = accept_rejection(sampled, groups, torch.full((1, 1, 6), 1 / 6))
    assert results[1].tokens == [int(sampled.token_ids[2])]
    assert results[1].sources == [PLAIN]


# ---- joint distribution of the first three tokens ----------------------------------------------------

V, GAMMA, LENGTH = 5, 3, 3


def chain(seed, spread):
    """Logits of the next token given the newest one [V, V]."""
    return torch.randn(V, V, generator=torch.Generator().manual_seed(seed)) * spread


def draft_block(backend, logits, news, outputs, seeds, temperature, stream, greedy=False):
    """Draw GAMMA tokens from the chain `logits`; tokens [R, G], the distributions they come from [R, G, V]."""
    tokens, probs = [], []
    for k in range(GAMMA):
        rows = logits[news] / temperature
        noise = backend.gumbel(seeds, torch.tensor([len(o) + k for o in outputs]), stream, V)
        news = (rows if greedy else rows + noise).argmax(dim=-1)
        tokens.append(news)
        probs.append(torch.softmax(rows, dim=-1))
    return torch.stack(tokens, dim=1), torch.stack(probs, dim=1)


def run_rounds(trials, params, target, draft, rule, temperature=1.0, greedy_draft=False, claimed=None):
    """Outputs of `trials` requests, decoded in whole rounds until LENGTH tokens are there; and what was seen."""
    backend = HashBackend()
    sampler = Sampler(backend, V, V, ())
    outputs: list[list[int]] = [[] for _ in range(trials)]
    sources = dict.fromkeys(TokenSource, 0)
    while running := [i for i, output in enumerate(outputs) if len(output) < LENGTH]:
        news = torch.tensor([outputs[i][-1] if outputs[i] else 0 for i in running])
        held = [outputs[i] for i in running]
        stream = NoiseStream.TARGET if rule == "coupled" else NoiseStream.DRAFT
        drafts, probs = draft_block(
            backend, draft, news, held, torch.tensor(running), temperature, stream, greedy_draft
        )
        groups = [
            make_group(params, seed=i, output=outputs[i], drafts=row)
            for i, row in zip(running, drafts.tolist(), strict=True)
        ]
        logits = target[torch.cat([news[:, None], drafts], dim=1)].flatten(0, 1)
        result = sampler.sample(logits, groups)
        if rule == "coupled":
            accepted = accept_coupled(result.token_ids, groups)
        else:
            q = None if greedy_draft and claimed is None else (probs if claimed is None else claimed(probs))
            accepted = accept_rejection(result, groups, q)
        for i, outcome in zip(running, accepted, strict=True):
            outputs[i].extend(outcome.tokens)
            for source in outcome.sources:
                sources[source] += 1
    return outputs, sources


def joint(params, target):
    """Exact probabilities of the first LENGTH tokens [V, V, V]."""
    sampler = Sampler(HashBackend(), V, V, ())
    rows = sampler.sample(target, [make_group(params) for _ in range(V)]).processed(range(V))
    p = torch.softmax(rows.double(), dim=-1)
    return p[0][:, None, None] * p[:, :, None] * p[None, :, :]


def misfit(outputs, params, target):
    """Chi-square of the triples over its limit: above 1 is a failure (false alarm 3e-7)."""
    first = torch.tensor([output[:LENGTH] for output in outputs])
    code = (first[:, 0] * V + first[:, 1]) * V + first[:, 2]
    statistic, cells = chi_square(torch.bincount(code, minlength=V**3), joint(params, target))
    return statistic / chi_square_limit(cells)


TARGET, DRAFT = chain(1, 1.0), chain(1, 1.0) + chain(2, 0.7)
TRIALS = 5_000
CASES = {
    "plain": {},
    "hot draft": {"temperature": 2.0},
    "draft without randomness": {"greedy_draft": True},
}


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("fields", [{"temperature": 1.0}, {"temperature": 0.8, "top_k": 3}])
def test_the_joint_distribution_is_the_targets(rule, case, fields):
    """All ways a token can come to be take part: accepted, correction, bonus. False alarm 3e-7 a case."""
    params = SamplingParams(**fields)
    outputs, sources = run_rounds(TRIALS, params, TARGET, DRAFT, rule, **CASES[case])
    assert all(sources[s] > TRIALS / 20 for s in (ACCEPTED, CORRECTION, BONUS)), sources
    assert misfit(outputs, params, TARGET) < 1


def test_a_wrong_q_is_noticed():
    """The same check fails when q is not the distribution the drafts came from: it has power."""
    params = SamplingParams(temperature=1.0)
    for wrong in (
        {"temperature": 2.0, "claimed": lambda probs: torch.softmax(probs.log() * 2, dim=-1)},  # q before temperature
        {"greedy_draft": True, "claimed": lambda probs: probs},  # argmax drafts judged by the softmax
        {"claimed": lambda probs: torch.full_like(probs, 1 / V)},
    ):
        outputs, _ = run_rounds(TRIALS, params, TARGET, DRAFT, "rejection", **wrong)
        assert misfit(outputs, params, TARGET) > 1.5


def test_coupled_outputs_do_not_depend_on_the_draft():
    params = SamplingParams(temperature=1.0)
    runs = [
        run_rounds(300, params, TARGET, draft, "coupled", temperature=t, greedy_draft=g)[0]
        for draft, t, g in ((DRAFT, 1.0, False), (DRAFT, 3.0, False), (-TARGET, 1.0, True), (TARGET, 1.0, False))
    ]
    for output in runs[1:]:
        assert [o[:LENGTH] for o in output] == [o[:LENGTH] for o in runs[0]]


def test_a_perfect_draft_is_always_accepted_by_both_rules():
    for rule in ("coupled", "rejection"):
        outputs, sources = run_rounds(300, SamplingParams(), TARGET, TARGET, rule)
        assert sources[CORRECTION] == 0
        assert all(len(output) == GAMMA + 1 for output in outputs)


def test_rejection_accepts_with_the_overlap_of_the_distributions():
    """Share of first drafts accepted = sum of min(p, q); 5 sigma (false alarm 6e-7)."""
    p, q = torch.softmax(TARGET[0], -1), torch.softmax(DRAFT[0], -1)
    overlap = float(torch.minimum(p, q).sum())
    backend = HashBackend()
    count = 10_000
    seeds = torch.arange(count)
    drafts = (DRAFT[0] + backend.gumbel(seeds, torch.zeros(count, dtype=torch.int64), NoiseStream.DRAFT, V)).argmax(-1)
    groups = [make_group(seed=i, drafts=[d]) for i, d in enumerate(drafts.tolist())]
    result = Sampler(backend, V, V, ()).sample(TARGET[0].expand(2 * count, V), groups)
    share = sum(r.num_accepted for r in accept_rejection(result, groups, q.expand(count, 1, V))) / count
    assert abs(share - overlap) < 5 * math.sqrt(overlap * (1 - overlap) / count)


def test_what_follows_a_rejection_knows_nothing_of_the_drafts_noise():
    """Drafts of token 0 never pass (p = 0). Were the residual drawn with the noise that chose them, the share of token
    1, which drafts like, would be too small by far. 5 sigma (false alarm 6e-7)."""
    p, q = torch.tensor([0.0, 0.6, 0.4]), torch.tensor([0.5, 0.4, 0.1])
    backend, count = HashBackend(), 10_000
    noise = backend.gumbel(torch.arange(count), torch.zeros(count, dtype=torch.int64), NoiseStream.DRAFT, 3)
    seeds = ((q.log() + noise).argmax(-1) == 0).nonzero().flatten().tolist()
    groups = [make_group(seed=seed, drafts=[0]) for seed in seeds]
    result = Sampler(backend, 3, 3, ()).sample(p.log().clamp_min(-1e9).expand(2 * len(seeds), 3), groups)
    outcomes = accept_rejection(result, groups, q.expand(len(seeds), 1, 3))
    assert all(outcome.num_accepted == 0 for outcome in outcomes)
    share = sum(outcome.tokens[0] == 1 for outcome in outcomes) / len(seeds)
    assert abs(share - 0.4) < 5 * math.sqrt(0.4 * 0.6 / len(seeds)), share  # p - q = 0.2 and 0.3
