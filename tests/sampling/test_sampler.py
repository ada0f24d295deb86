"""What is drawn, and that it never depends on the neighbours."""

import math

import pytest
import torch
from sampling.row_fakes import HashBackend, chi_square, chi_square_limit, make_group

from exactspec.sampling.argmax import lowest_argmax
from exactspec.sampling.rows import first_rows
from exactspec.sampling.sampler import Sampler, sampling_support
from exactspec.types import SamplingParams

EOS = (3,)
MIXED = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 2.0, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 0.5, "top_k": 40, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 1.0, "min_p": 0.1, "min_new_tokens": 3},
    {"temperature": 0.0, "presence_penalty": 1.5, "repetition_penalty": 1.1},
    {"temperature": 1.0, "frequency_penalty": 0.5, "logit_bias": {5: 3.0, 6: -100.0}},
]


def make_sampler(vocab, valid=None, backend=None):
    return Sampler(backend or HashBackend(), vocab, valid or vocab, EOS)


def mixed_groups(vocab, generator):
    groups = []
    for i, fields in enumerate(MIXED * 2):
        drafts = torch.randint(vocab, (int(torch.randint(5, (1,), generator=generator)),), generator=generator).tolist()
        output = torch.randint(vocab, (i % 4,), generator=generator).tolist()
        masks = torch.rand(len(drafts) + 1, vocab, generator=generator) < 0.5 if i % 5 == 4 else None
        groups.append(make_group(SamplingParams(**fields), seed=i * 7 - 20, output=output, drafts=drafts, masks=masks))
    return groups


@pytest.mark.parametrize(("vocab", "valid"), [(13, 13), (257, 250), (1000, 1000), (6001, 5990)])
def test_a_row_alone_equals_the_row_in_any_batch(vocab, valid):
    generator = torch.Generator().manual_seed(vocab)
    groups = mixed_groups(vocab, generator)
    starts = first_rows(groups)
    logits = torch.randn(starts[-1], vocab, generator=generator) * 4
    rows = list(range(starts[-1]))
    together = make_sampler(vocab, valid).sample(logits, groups)
    assert (together.token_ids < valid).all()
    backwards = make_sampler(vocab, valid)
    order = list(reversed(range(len(groups))))
    shuffled_rows = torch.cat([torch.arange(starts[g], starts[g + 1]) for g in order])
    turned = backwards.sample(logits[shuffled_rows], [groups[g] for g in order])
    assert torch.equal(turned.token_ids, together.token_ids[shuffled_rows])
    for g, group in enumerate(groups):
        part = slice(starts[g], starts[g + 1])
        alone = make_sampler(vocab, valid).sample(logits[part].clone(), [group])
        own = list(range(group.num_rows))
        assert torch.equal(alone.token_ids, together.token_ids[part])
        assert torch.equal(alone.adjusted, together.adjusted[part])
        assert torch.equal(alone.scaled(own), together.scaled(rows)[part])
        assert torch.equal(alone.processed(own), together.processed(rows)[part])
        assert torch.equal(alone.processed(own[-1:]), together.processed(rows[part])[-1:])
        for j in own:
            assert sampling_support(alone, [j]) == sampling_support(together, [starts[g] + j])


def test_the_logits_are_left_alone():
    generator = torch.Generator().manual_seed(0)
    groups = mixed_groups(40, generator)
    logits = torch.randn(first_rows(groups)[-1], 40, generator=generator)
    before = logits.clone()
    result = make_sampler(40).sample(logits, groups)
    result.processed(range(len(logits)))
    assert torch.equal(logits, before)


def test_a_draw_is_the_definition():
    """argmax over the processed row plus the noise of (seed, output position)."""
    generator = torch.Generator().manual_seed(1)
    groups = mixed_groups(300, generator)
    logits = torch.randn(first_rows(groups)[-1], 300, generator=generator) * 2
    backend = HashBackend()
    result = make_sampler(300).sample(logits, groups)
    row = 0
    for group in groups:
        for position in group.positions:
            weights = result.processed([row])[0]
            if not group.params.greedy:
                weights = weights + backend.gumbel(torch.tensor([group.seed]), torch.tensor([position]), 0, 300)[0]
            assert int(result.token_ids[row]) == int(weights.argmax())
            row += 1


def test_greedy_takes_the_lowest_of_equals_and_is_certain():
    logits = torch.zeros(3, 1000)
    logits[0, [900, 17, 600]] = 5.0
    logits[1, [999, 998]] = 1.0
    logits[2, 0] = -1.0
    result = make_sampler(1000).sample(logits, [make_group(temperature=0.0, drafts=[1, 1])])
    assert result.token_ids.tolist() == [17, 998, 1]
    assert torch.log_softmax(result.processed([0]), -1)[0, 17] == 0.0
    assert sampling_support(result, [0, 1]) == [([17], [0.0]), ([998], [0.0])]


@pytest.mark.parametrize("width", [1, 255, 256, 511, 512, 513, 1000, 1024])
def test_argmax_agrees_with_python(width):
    generator = torch.Generator().manual_seed(width)
    rows = torch.randint(-3, 4, (40, width), generator=generator).float()
    rows[1] = -math.inf
    wanted = [row.index(max(row)) for row in rows.tolist()]
    assert lowest_argmax(rows).tolist() == wanted
    wide = torch.full((40, width + 9), 50.0)
    wide[:, :width] = rows
    assert lowest_argmax(wide[:, :width]).tolist() == wanted


def test_padded_ids_are_never_drawn_even_when_they_lead():
    logits = torch.randn(60, 40)
    logits[:, 30:] = 50.0
    groups = [make_group(SamplingParams(**MIXED[i % 7]), seed=i) for i in range(60)]
    result = make_sampler(40, 30).sample(logits, groups)
    assert (result.token_ids < 30).all()
    assert (result.processed(range(60))[:, 30:] == -math.inf).all()
    assert torch.equal(result.scaled([0]), logits[:1])  # the model's own row: rescoring as a prompt gives the same


def test_temperature_and_filters_act():
    """top_k=1, a tiny top_p and min_p=1 equal greedy; a high temperature spreads."""
    logits = torch.randn(1, 200)
    best = int(logits.argmax())
    sampler = make_sampler(200)
    for fields in ({"top_k": 1}, {"top_p": 1e-4}, {"min_p": 1.0}, {"temperature": 0.0}, {"temperature": 1e-7}):
        for seed in range(5):
            assert sampler.sample(logits, [make_group(seed=seed, **fields)]).token_ids.tolist() == [best]
    hot = {int(sampler.sample(logits, [make_group(seed=s, temperature=2.0)]).token_ids) for s in range(50)}
    assert len(hot) > 10


def test_seeds_of_every_size_and_sign_differ_and_repeat():
    logits = torch.zeros(1, 5000)
    draws = {}
    for seed in (0, 1, -1, 2**31, 2**63 - 1, -(2**63)):
        tokens = [
            [
                int(make_sampler(5000).sample(logits, [make_group(seed=seed, output=[0] * p)]).token_ids)
                for p in range(4)
            ]
            for _ in range(2)
        ]
        assert tokens[0] == tokens[1]
        draws[tuple(tokens[0])] = seed
    assert len(draws) == 6  # false alarm: below 1e-13


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.3, "top_k": 2},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 1.5, "min_p": 0.2, "logit_bias": {1: 1.0}},
    ],
)
def test_draws_have_the_processed_distribution(fields):
    """8,000 draws; false alarm about 3e-7 per case."""
    logits = torch.tensor([1.0, 0.5, 2.0, -1.0, 0.0, 1.5])
    count = 8_000
    groups = [make_group(SamplingParams(**fields), seed=seed) for seed in range(count)]
    result = make_sampler(6).sample(logits.expand(count, 6), groups)
    probs = torch.softmax(result.processed([0])[0], dim=-1)
    statistic, cells = chi_square(torch.bincount(result.token_ids, minlength=6), probs)
    assert statistic < chi_square_limit(cells)


def test_support_is_what_the_filters_left_and_sums_to_one():
    logits = torch.randn(2, 500)
    result = make_sampler(500).sample(logits, [make_group(top_k=10, temperature=0.8), make_group(top_p=0.95, seed=3)])
    for row, (ids, logprobs) in enumerate(sampling_support(result, [0, 1])):
        assert int(result.token_ids[row]) in ids
        assert sum(math.exp(x) for x in logprobs) == pytest.approx(1.0, abs=1e-5)
        assert ids == sorted(ids)
    assert len(sampling_support(result, [0])[0][0]) == 10


def test_wrong_shapes_are_named():
    with pytest.raises(ValueError, match=r"logits: expected shape \(2, 9\), got \(1, 9\)"):
        make_sampler(9).sample(torch.zeros(1, 9), [make_group(drafts=[1])])
