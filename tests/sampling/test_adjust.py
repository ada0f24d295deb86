"""Penalties, bias and masks along a block are those of one token at a time."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling.row_fakes import HashBackend, make_group

from exactspec.sampling.adjust import OutputHistory, adjust_rows, make_draft_adjust
from exactspec.sampling.sampler import Sampler
from exactspec.types import SamplingParams

V = 12
EOS = (3,)


def naive_row(row, params, output, position, mask=None):
    """One row in Python floats, after `output`."""
    row = list(row)
    for token in set(output):
        value = row[token] - params.frequency_penalty * output.count(token) - params.presence_penalty
        rep = params.repetition_penalty
        row[token] = value / rep if value > 0 else value * rep
    for token, bias in (params.logit_bias or {}).items():
        row[token] += bias
    if position < params.min_new_tokens:
        for token in {*EOS, *params.stop_token_ids} & set(range(V)):
            row[token] = -math.inf
    if mask is not None:
        row = [x if allowed else -math.inf for x, allowed in zip(row, mask, strict=True)]
    return row


params_strategy = st.builds(
    SamplingParams,
    min_new_tokens=st.integers(0, 8),
    frequency_penalty=st.sampled_from([0.0, 0.7, -1.5, 2.0]),
    presence_penalty=st.sampled_from([0.0, 0.9, -2.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    logit_bias=st.sampled_from([None, {0: 4.0, 7: -100.0}]),
    stop_token_ids=st.sampled_from([(), (5,), (5, 119690, -4)]),
)
tokens_strategy = st.lists(st.integers(0, V - 1), max_size=7)


@settings(max_examples=200, deadline=None)
@given(
    params=params_strategy, output=tokens_strategy, drafts=tokens_strategy, masked=st.booleans(), seed=st.integers(0, 9)
)
def test_a_block_equals_one_token_at_a_time(params, output, drafts, masked, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = len(drafts) + 1
    logits = torch.randn(rows, V, generator=generator) * 3
    before = logits.clone()
    masks = torch.rand(rows, V, generator=generator) < 0.7 if masked else None
    if masks is not None:
        masks[:, 8] = True  # something other than EOS is always allowed
    block = adjust_rows(logits, [make_group(params, output=output, drafts=drafts, masks=masks)], EOS).all()
    assert torch.equal(logits, before)
    for j in range(rows):
        seen = output + drafts[:j]
        mask = masks[j : j + 1] if masks is not None else None
        alone = adjust_rows(logits[j : j + 1], [make_group(params, output=seen, masks=mask)], EOS).all()
        assert torch.equal(block[j], alone[0])
        wanted = naive_row(logits[j].tolist(), params, seen, len(seen), None if masks is None else masks[j].tolist())
        assert torch.allclose(block[j], torch.tensor(wanted), rtol=1e-5, atol=1e-5)


def test_nothing_to_do_gives_back_the_same_tensor():
    logits = torch.randn(5, V)
    groups = [make_group(drafts=[1, 2]), make_group(min_new_tokens=2, output=[1, 2]), make_group(temperature=0.0)]
    assert adjust_rows(logits, groups, EOS).all() is logits


def test_changed_rows_sit_among_the_unchanged():
    logits = torch.randn(4, V)
    adjusted = adjust_rows(logits, [make_group(), make_group(logit_bias={1: 1.0}), make_group(drafts=[1])], EOS)
    wanted = logits.clone()
    wanted[1, 1] += 1.0
    assert torch.equal(adjusted.all(), wanted)
    for rows in ([0], [1], [3, 1, 0], [1, 2, 3], [2, 2], []):
        assert torch.equal(adjusted.select(rows), wanted[rows])


def test_min_new_tokens_ends_inside_the_block():
    logits = torch.zeros(4, V)
    group = make_group(min_new_tokens=4, stop_token_ids=(5,), output=[1, 1], drafts=[1, 1, 1])
    block = adjust_rows(logits, [group], EOS).all()
    assert (block[:2, [3, 5]] == -math.inf).all()
    assert torch.equal(block[2:], logits[2:])


def test_a_grammar_that_can_only_end_beats_min_new_tokens():
    logits = torch.zeros(2, V)
    masks = torch.zeros(2, V, dtype=torch.bool)
    masks[0, [3, 4]] = True
    masks[1, 3] = True
    block = adjust_rows(logits, [make_group(min_new_tokens=9, drafts=[4], masks=masks)], EOS).all()
    assert block[0].tolist() == [0.0 if i == 4 else -math.inf for i in range(V)]
    assert block[1].tolist() == [0.0 if i == 3 else -math.inf for i in range(V)]


def test_history_that_missed_tokens_is_noticed():
    group = make_group(presence_penalty=1.0, output=[1, 2])
    group.first_position = 3
    with pytest.raises(RuntimeError, match="history of 3 output tokens, it holds 2"):
        adjust_rows(torch.zeros(1, V), [group], EOS)


def test_history_counts():
    history = OutputHistory([4, 4, 2])
    history.advance([2, 9])
    assert (history.count(4), history.count(2), history.count(1), history.num_tokens) == (2, 2, 0, 5)


class _Grammar:
    """Allows token (number of drafts so far) and its successor."""

    def masks(self, draft_tokens):
        masks = torch.zeros(len(draft_tokens) + 1, V, dtype=torch.bool)
        for j in range(len(draft_tokens) + 1):
            masks[j, [j, j + 1]] = True
        return masks


def test_the_draft_hook_gives_what_the_target_will_apply():
    sampler = Sampler(HashBackend(), V, V, EOS)
    requests = [
        make_group(seed=1).request,
        make_group(frequency_penalty=1.0, repetition_penalty=1.2, output=[4, 5]).request,
        make_group(min_new_tokens=2, logit_bias={6: 2.0}).request,
        make_group().request,
    ]
    requests[3].grammar = _Grammar()
    adjust = make_draft_adjust(requests, sampler)
    drafts = torch.tensor([[1, 2, 3], [4, 4, 6], [7, 8, 9], [0, 1, 2]])
    for k in range(4):
        logits = torch.randn(4, V)
        got = adjust(k, logits, drafts[:, :k])
        for r, request in enumerate(requests):
            prefix = drafts[r, :k].tolist()
            masks = request.grammar.masks(prefix) if request.grammar else None
            group = make_group(request.params, output=request.token_ids[3:], drafts=prefix, masks=masks)
            rows = logits[r].expand(k + 1, V)
            assert torch.equal(got[r], adjust_rows(rows, [group], EOS).all()[-1])


def test_no_draft_hook_when_nobody_needs_one():
    sampler = Sampler(HashBackend(), V, V, EOS)
    assert make_draft_adjust([make_group(top_p=0.5).request, make_group().request], sampler) is None
