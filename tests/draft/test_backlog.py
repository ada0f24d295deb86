"""What a drafter has still to learn: marks and features against a dictionary that is always up to date."""

from __future__ import annotations

import pytest
import torch

from exactspec.draft.backlog import MOST_DUE, MOST_ROWS_DUE, Backlog

SLOTS, PAGE, WIDTH = 64, 4, 3


@pytest.mark.parametrize("look_every", [1, 5, 3 * MOST_DUE])
def test_whenever_one_looks_it_is_what_was_written_last(look_every: int) -> None:
    """Slots are kept, made and kept again in random order, some of them twice before anybody looks."""
    rng = torch.Generator().manual_seed(look_every)
    backlog, truth = Backlog(SLOTS, WIDTH, torch.float32, torch.device("cpu")), {}
    pages = torch.arange(SLOTS // PAGE, dtype=torch.int32)[None]
    lens = torch.tensor([SLOTS - 5])
    for step in range(200):
        slots = torch.randperm(SLOTS, generator=rng)[: 1 + step % 9].int()
        if torch.rand((), generator=rng) < 0.6:
            features = torch.rand(slots.shape[0], WIDTH, generator=rng)
            backlog.keep(slots, features)
            truth.update(zip(slots.tolist(), features, strict=True))
        else:
            backlog.strike(slots)
            for slot in slots.tolist():
                truth.pop(slot, None)
        if step % look_every == look_every - 1:
            positions, found = backlog.behind(pages, lens, PAGE)
            assert found.tolist() == sorted(slot for slot in truth if slot < SLOTS - 5)
            assert positions.tolist() == found.tolist(), "pages lie in order here"
            for slot, row in zip(found.tolist(), backlog.features(found), strict=True):
                assert torch.equal(row, truth[slot])


def test_what_waits_is_bounded() -> None:
    backlog = Backlog(SLOTS * 8, WIDTH, torch.float32, torch.device("cpu"))
    slots = torch.arange(50, dtype=torch.int32)
    for _ in range(100):
        backlog.keep(slots, torch.rand(50, WIDTH))
        assert sum(features.shape[0] for _, features in backlog._due if features is not None) < MOST_ROWS_DUE
    for _ in range(100):
        backlog.strike(slots)
        assert len(backlog._due) < MOST_DUE
