"""Whole blocks drawn in one native call: the tokens of the position-by-position loop."""

from __future__ import annotations

import pytest
import torch

from exactspec.backend.base import ChainedLinear
from exactspec.backend.cpu.backend import CpuBackend
from exactspec.draft.draw import BlockDrawer, DrawPlan, OutputHead
from exactspec.draft.heads import GatedMarkovHead, MarkovHead
from exactspec.errors import ConfigError

RANK, HIDDEN, GAMMA = 24, 40, 5


def gumbel(*shape: int) -> torch.Tensor:
    return -torch.log(-torch.log(torch.rand(shape)))


def plan_of(temperatures: list[float], vocab_size: int) -> DrawPlan:
    sampled = [row for row, t in enumerate(temperatures) if t]
    noise = gumbel(len(sampled), GAMMA, vocab_size)
    return DrawPlan(
        inverse_temperature=torch.tensor([1.0 / t if t else 1.0 for t in temperatures]),
        is_sampled=torch.tensor([t > 0 for t in temperatures]),
        is_filtered=torch.zeros(len(temperatures), dtype=torch.bool),
        filters=None, sampled_rows=sampled, seeds=[0] * len(sampled), positions=[0] * len(sampled),
        noise=lambda seeds, positions, stream: noise.flatten(0, 1),
    )  # fmt: skip


class OneByOne:
    """The same weight without the way of drawing blocks."""

    def __init__(self, linear):
        self.linear = linear

    def __call__(self, x):
        return self.linear(x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("vocab_size", "temperatures"), [(1003, [0.0]), (640, [0.7, 0.0, 1.3]), (37, [1.0] * 12)])
def test_a_chain_draws_what_the_loop_draws(dtype, threads, vocab_size, temperatures) -> None:
    torch.manual_seed(vocab_size + threads)
    backend = CpuBackend(threads)
    requests = len(temperatures)
    head = MarkovHead(vocab_size, RANK, HIDDEN)
    weight = torch.randn(vocab_size, RANK).to(dtype)
    lm_head = backend.make_linear((torch.randn(vocab_size, HIDDEN) * 0.2).to(dtype))
    w2 = backend.make_linear(weight)
    assert isinstance(w2, ChainedLinear)
    hidden, anchors = torch.randn(requests, GAMMA, HIDDEN), torch.randint(0, vocab_size, (requests,))
    drawer, plan = BlockDrawer(backend, head, dtype), plan_of(temperatures, vocab_size)
    at_once, _ = drawer.draw(OutputHead(lm_head, w2), hidden, anchors, plan)
    one_by_one, _ = drawer.draw(OutputHead(lm_head, OneByOne(w2)), hidden, anchors, plan)
    assert torch.equal(at_once, one_by_one)
    backend.set_num_threads(1)


def test_a_chain_over_a_short_vocabulary_draws_what_the_loop_draws() -> None:
    """Round after round, with more requests than before, and anchors that the vocabulary holds and lacks."""
    torch.manual_seed(5)
    backend, vocab_size = CpuBackend(1), 300
    head = MarkovHead(vocab_size, RANK, HIDDEN)
    ids = torch.arange(0, vocab_size, 3)
    w2 = backend.make_linear(torch.randn(len(ids), RANK))
    lm_head = backend.make_linear(torch.randn(len(ids), HIDDEN) * 0.2)
    drawer = BlockDrawer(backend, head, torch.float32)
    for temperatures in ([0.0], [0.7, 0.0, 1.3], [1.0] * 8, [0.0, 1.0]):
        plan, hidden = plan_of(temperatures, vocab_size), torch.randn(len(temperatures), GAMMA, HIDDEN)
        anchors = torch.randint(0, vocab_size, (len(temperatures),))
        at_once, _ = drawer.draw(OutputHead(lm_head, w2, ids), hidden, anchors, plan)
        one_by_one, _ = drawer.draw(OutputHead(lm_head, OneByOne(w2), ids), hidden, anchors, plan)
        assert torch.equal(at_once, one_by_one)
        assert set(at_once.flatten().tolist()) <= set(ids.tolist())


@pytest.mark.parametrize("threads", [1, 2])
def test_equal_scores_go_to_the_lowest_id(threads) -> None:
    backend = CpuBackend(threads)
    w2 = backend.make_linear(torch.zeros(500, RANK))
    base = torch.zeros(2, 3, 500)
    base[1, :, [77, 301, 499]] = 1.0
    tokens = w2.draw_chain(torch.zeros(500, RANK), base, None, None, torch.tensor([4, 5]))
    assert tokens.tolist() == [[0, 0, 0], [77, 77, 77]]
    backend.set_num_threads(1)


def test_rows_that_do_not_fit_are_refused() -> None:
    w2 = CpuBackend(1).make_linear(torch.zeros(50, RANK))
    with pytest.raises(ConfigError, match="draw_chain"):
        w2.draw_chain(torch.zeros(50, RANK), torch.zeros(1, 2, 49), None, None, torch.tensor([0]))


def test_a_head_that_reads_hidden_states_is_drawn_step_by_step() -> None:
    backend = CpuBackend(1)
    w2 = backend.make_linear(torch.randn(64, RANK))
    output = OutputHead(backend.make_linear(torch.randn(64, HIDDEN)), w2)
    assert BlockDrawer(backend, MarkovHead(64, RANK, HIDDEN), torch.float32)._chain(output) is w2
    assert BlockDrawer(backend, GatedMarkovHead(64, RANK, HIDDEN), torch.float32)._chain(output) is None
