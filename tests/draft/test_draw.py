"""Choosing candidates, and the simulated acceptance of benchmarks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exactspec.draft.draw import BlockDrawer, OutputHead, make_plan, top_tokens
from exactspec.draft.simulate import SimulatedAcceptance
from exactspec.errors import ConfigError
from exactspec.types import Request, RunningRequest, SamplingParams


@settings(deadline=None, max_examples=40)
@given(st.sampled_from([3, 262, 4096, 4097, 5000, 8192, 9001]), st.sampled_from([1, 5, 64, 3000]), st.integers(0, 99))
def test_top_tokens_are_the_top_tokens(vocab_size, count, seed):
    values = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(seed))
    values[0, : vocab_size // 2] = float("-inf")
    found = top_tokens(values, count)
    wanted = values.topk(min(count, vocab_size), dim=-1)
    assert torch.equal(values.gather(-1, found).sort(-1, descending=True).values, wanted.values)
    assert found.shape == wanted.indices.shape
    assert int(found.max()) < vocab_size
    assert all(len(set(row)) == len(row) for row in found.tolist())


@settings(deadline=None)
@given(st.floats(1.0, 8.0), st.integers(0, 5), st.text(min_size=1, max_size=5), st.integers(1, 60))
def test_simulated_rounds_add_up_to_the_wish(mean_length, seed, request_id, num_rounds):
    """Each round takes one of the two nearest counts, and no stretch of rounds strays by a whole token."""
    policy = SimulatedAcceptance(mean_length, gamma=7, seed=seed)
    wish = mean_length - 1
    taken = [policy.num_accepted(request_id, i, 7) for i in range(num_rounds)]
    assert all(abs(count - wish) < 1 for count in taken)
    assert abs(sum(taken) - num_rounds * wish) <= 1
    assert taken == [policy.num_accepted(request_id, i, 7) for i in range(num_rounds)]
    assert all(policy.num_accepted(request_id, i, 2) == min(2, taken[i]) for i in range(num_rounds))


@pytest.mark.parametrize("length", [0.5, 8.5, float("nan"), float("inf")])
def test_lengths_that_no_round_can_have_are_refused(length):
    with pytest.raises(ConfigError, match=r"simulate_accept_length: must be between 1 and gamma \+ 1 = 8"):
        SimulatedAcceptance(length, gamma=7)


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.7), SamplingParams(temperature=0.7, top_k=5)])
def test_ids_that_are_never_drawn_have_no_chance(params):
    """Rows of the LM head beyond the tokenizer's ids are padding, however likely the draft finds them: rejection needs
    the distribution that was really drawn from."""
    vocab_size, valid, gamma = 12, 9, 4

    def noise(seeds, positions, stream):
        rows = torch.zeros(len(seeds), vocab_size)
        rows[:, valid:] = float("-inf")
        return rows

    logits = torch.arange(vocab_size).float().expand(gamma, vocab_size)
    drawer = BlockDrawer(object(), None, torch.float32)
    request = RunningRequest(Request("r", (1,), params, seed=3), [1])
    plan = make_plan([request], noise, torch.device("cpu"))
    output = OutputHead(lambda hidden: logits, None)
    hidden, anchors = torch.zeros(1, gamma, 2), torch.zeros(1, dtype=torch.int64)
    tokens, probs = drawer.draw(output, hidden, anchors, plan, want_probs=True)
    assert probs[..., valid:].max() == 0.0
    assert torch.allclose(probs.sum(-1), torch.ones(1, gamma))
    assert tokens.unique().tolist() == [valid - 1]
