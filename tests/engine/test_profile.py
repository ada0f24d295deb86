"""What was measured for one engine serves the next one only where it says enough."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fakes import tiny_model

from exactspec.draft.block import BlockDrafter
from exactspec.draft.checkpoint import load_block_model
from exactspec.engine import profile

sys.path.insert(0, str(Path(__file__).parent.parent / "draft"))
from draft_fakes import draft_config, write_draft


@pytest.fixture
def drafter(tmp_path, monkeypatch):
    monkeypatch.setenv("EXACTSPEC_CACHE", str(tmp_path / "cache"))
    target = tiny_model(num_layers=3)
    return BlockDrafter(load_block_model(write_draft(tmp_path / "draft", draft_config())), target, 512)


def test_curves_of_an_engine_for_one_request_do_not_serve_an_engine_for_many(drafter, monkeypatch):
    measured = []

    def measure(run_step, sizes, repeats):
        run_step(sizes[0])
        measured.append(list(sizes))
        return [0.001 * size for size in sizes]

    def draft_points(max_requests):
        measured.clear()
        costs = profile.load_or_measure(drafter.target, drafter, "tiny", max_requests=max_requests, num_slots=512)
        return list(costs.draft.rows), len(measured)

    monkeypatch.setattr(profile, "measure_steps", measure)
    assert draft_points(1) == ([1], 2)
    assert draft_points(1) == ([1], 0)
    assert draft_points(9) == ([1, 2, 4, 8], 2)
    assert draft_points(15) == ([1, 2, 4, 8], 0)
    assert draft_points(4) == ([1, 2, 4, 8], 0)
    assert draft_points(1000) == (list(profile.DRAFT_REQUESTS), 2)
