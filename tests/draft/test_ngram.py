"""Prompt lookup against a naive search of the whole text, round after round of one request."""

from __future__ import annotations

import pytest
import torch
from draft_fakes import running
from hypothesis import given, settings
from hypothesis import strategies as st

from exactspec.draft.base import DraftBatch
from exactspec.draft.ngram import NgramDrafter
from exactspec.draft.none import NoDrafter
from exactspec.errors import ConfigError
from exactspec.types import RunningRequest


def draft_batch(*requests: RunningRequest) -> DraftBatch:
    return DraftBatch(
        requests=requests,
        anchor_ids=torch.tensor([r.token_ids[-1] for r in requests]),
        anchor_positions=torch.tensor([len(r.token_ids) - 1 for r in requests], dtype=torch.int32),
        page_table=torch.zeros((len(requests), 1), dtype=torch.int32),
        page_size=16,
        max_kv_len=0,
    )


def naive_lookup(tokens: list[int], gamma: int, max_n: int = 3, min_n: int = 1) -> list[int]:
    """For each n from long to short: scan backwards for the newest earlier occurrence of the last n tokens."""
    for n in range(max_n, min_n - 1, -1):
        if len(tokens) <= n:
            continue
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[-n:]:
                text, at = list(tokens), start + n
                for _ in range(gamma):  # a copy may run over what it has just written
                    text.append(text[at])
                    at += 1
                return text[len(tokens) :]
    return []


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.integers(0, 3), min_size=2, max_size=40),
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=8), max_size=5),
    st.integers(1, 8),
    st.sampled_from([(3, 1), (2, 2), (4, 1), (1, 1)]),
)
def test_every_round_finds_what_a_full_search_finds(prompt, rounds, gamma, sizes):
    max_n, min_n = sizes
    drafter = NgramDrafter(gamma, max_n, min_n)
    request = running(prompt, max_new=1000)
    for added in [[], *rounds]:
        request.token_ids.extend(added)
        proposal = drafter.propose(draft_batch(request))
        wanted = naive_lookup(request.token_ids, gamma, max_n, min_n)
        assert proposal.token_ids[0, : proposal.lengths[0]].tolist() == wanted
        assert proposal.probs is None
        assert proposal.confidence is None


def test_no_draft_beyond_what_the_request_can_use():
    request = running([1, 2, 1, 2, 1], max_new=4)  # one output token so far, the bonus takes one place
    proposal = NgramDrafter(gamma=7).propose(draft_batch(request))
    assert proposal.lengths == [2]
    assert proposal.token_ids[0, :2].tolist() == [2, 1]


def test_requests_do_not_see_each_other_and_are_forgotten():
    drafter = NgramDrafter(gamma=3)
    first, second = running([1, 2, 3, 1], request_id="a"), running([9, 8, 7, 1], request_id="b")
    proposal = drafter.propose(draft_batch(first, second))
    assert proposal.lengths == [3, 0]
    assert proposal.token_ids[0].tolist() == [2, 3, 1]
    drafter.forget(first)
    drafter.forget(first)  # also when it is gone, or was never seen
    drafter.forget(running([1, 2], request_id="never"))
    again = running([4, 5, 4], request_id="a")  # the id comes back with another text
    assert drafter.propose(draft_batch(again)).token_ids[0].tolist() == [5, 4, 5]


def test_a_shorter_text_under_a_known_id_is_indexed_afresh():
    drafter = NgramDrafter(gamma=2)
    drafter.propose(draft_batch(running([1, 2, 3, 1, 2, 3, 1, 2, 3], request_id="a")))
    assert drafter.propose(draft_batch(running([1, 5, 1], request_id="a"))).token_ids[0].tolist() == [5, 1]


@pytest.mark.parametrize("arguments", [{"gamma": 0}, {"max_n": 0}, {"min_n": 0}, {"min_n": 4}])
def test_settings_that_cannot_work_are_refused(arguments):
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        NgramDrafter(**arguments)


def test_plain_decoding_proposes_nothing():
    proposal = NoDrafter().propose(draft_batch(running([1, 2, 1]), running([3, 4])))
    assert proposal.lengths == [0, 0]
    assert proposal.token_ids.shape == (2, 0)
    assert NoDrafter.gamma == 0
    assert NoDrafter.capture_layers == ()
