"""Rollouts where rounds are captured: every proposal is written down, as where they are not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from train_fakes import run_cases

TESTS = Path(__file__).parents[1]
CODE = """
from test_cuda_round import NoGraphs, make_engine
from exactspec.engine.cuda_round import CudaRoundRunner
from exactspec.engine.llm import LLM
from exactspec.engine.round import RoundRunner
from exactspec.engine.verify_policy import VerifyAll
from exactspec.train import rollouts
from exactspec.types import SamplingParams

def captured(target, drafter, sampler, policy, pool, page_size, most):
    return CudaRoundRunner(target, drafter, sampler, policy, pool, page_size, most_requests=3, graphs=NoGraphs())

def ordinary(target, drafter, sampler, policy, pool, page_size, most):
    return RoundRunner(target, drafter, sampler, policy, pool, page_size)

params = [SamplingParams(max_new_tokens=4, temperature=float(t), seed=t, ignore_eos=True) for t in (0, 1)]
for acceptance in ("coupled", "rejection"):
    seen = []
    for make in (captured, ordinary):
        rollouts.make_runner = make
        llm = LLM.around(make_engine("dspark", make is captured, make_policy=lambda gamma: VerifyAll(acceptance)))
        answers, rounds, _ = rollouts.run_rollouts(llm, [[5, 9, 5, 9, 5], [5, 9, 7]], params)
        arrays = [rounds.known.tolist(), rounds.accepted.tolist(), rounds.confidence.round(2).tolist()]
        seen.append(str(([a.token_ids for a in answers], arrays, rounds.commit_lens)))
        assert len(rounds.known) > 1
    assert seen[0] == seen[1], seen
print("all equal")
"""


@pytest.mark.long
def test_rollouts_of_captured_rounds_are_those_of_ordinary_ones() -> None:
    paths = [str(TESTS / "engine"), str(TESTS), os.environ.get("PYTHONPATH", "")]
    run_cases(CODE, TRITON_INTERPRET="1", OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(paths))
