"""How many drafts of each request are verified in a step (verify_len), the bonus row of each being certain.

DSpark, arXiv 2607.05147, section 3.2, algorithm 1: drafts of all requests are admitted in falling order of their
prefix survival a[r, j], and the number admitted maximises the expected tokens per second tau * SPS(B), where
tau = R + sum of the admitted a (each request's own token comes for certain) and B is the number of rows. As a falls
along a block, what is admitted is always a prefix, and for each B the best choice there is.

Losslessness. With coupled acceptance no choice can change a token, so the maximum is searched over all B: measured
curves are staircases with more than one local maximum. With `rejection`, whether draft j is verified must not depend on
its own token (appendix A): a later confidence of the same block does, and a global search that looks at it would favour
some tokens over others. `stop_early` admits one draft after the other and ends at the first that does not raise the
objective, so that a decision rests on survivals at least as high: the block's own past and other requests. It would get
stuck at the first stair; it therefore climbs the convex curve below the measured one, where the first peak is the only.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from exactspec.errors import ConfigError
from exactspec.verify.sps import SpsTable


@dataclass(frozen=True, slots=True)
class VerifyPlan:
    """verify_lens[r] drafts of request r are verified. The other fields are for stats: expectations of this step."""

    verify_lens: list[int]
    num_rows: int  # base rows and admitted drafts
    expected_tokens: float  # tau summed over the requests, bonus tokens included
    tokens_per_second: float


def plan_confidence(
    survival: ArrayLike,
    lengths: Sequence[int],
    base_rows: int,
    table: SpsTable,
    *,
    stop_early: bool,
    draft_seconds: float = 0.0,
) -> list[int]:
    """verify_lens that maximise the expected tokens per second; see `make_plan`."""
    return make_plan(
        survival, lengths, base_rows, table, stop_early=stop_early, draft_seconds=draft_seconds
    ).verify_lens


def make_plan(
    survival: ArrayLike,
    lengths: Sequence[int],
    base_rows: int,
    table: SpsTable,
    *,
    stop_early: bool,
    draft_seconds: float = 0.0,
) -> VerifyPlan:
    """Plans one step.

    survival [R, G]: falling along each row; entries at and beyond lengths[r] are not looked at. base_rows: rows that
    the step has anyway, the R anchors and all prefill rows. draft_seconds: time that the step has spent on drafting,
    which no plan gives back. stop_early: True for rejection acceptance (see above).
    """
    blocks: list[list[float]] = survival if isinstance(survival, list) else np.asarray(survival).tolist()
    num_requests = len(lengths)
    if len(blocks) != num_requests:
        raise ConfigError(f"survival has shape {np.shape(survival)} for {num_requests} requests")
    if any(not 0 <= length <= len(block) for length, block in zip(lengths, blocks, strict=True)):
        raise ConfigError(f"lengths must be within 0 .. {len(blocks[0])}, got {list(lengths)}")
    # plain Python: some dozens of numbers, in a moment when nothing of numpy is in any cache
    drafts = [(a, owner) for owner, block in enumerate(blocks) for a in block[: lengths[owner]]]
    drafts.sort(key=_falling)  # equal ones stay in the order of their block
    tokens = list(itertools.accumulate((a for a, _ in drafts), initial=float(num_requests)))
    rates = _rates(tokens, table.sps_range(base_rows, len(tokens)), draft_seconds)
    if stop_early:
        count = _first_peak(_rates(tokens, table.sps_range(base_rows, len(tokens), convex=True), draft_seconds))
    else:
        count = rates.index(max(rates))
    lens = [0] * num_requests
    for _, owner in drafts[:count]:
        lens[owner] += 1
    return VerifyPlan(lens, base_rows + count, tokens[count], rates[count])


def _falling(draft: tuple[float, int]) -> float:
    return -draft[0]


def _rates(tokens: list[float], sps: NDArray[np.float64], draft_seconds: float) -> list[float]:
    return [n / (1.0 / speed + draft_seconds) for n, speed in zip(tokens, sps.tolist(), strict=True)]


def rates_ahead(
    survival: ArrayLike,
    num_requests: int,
    base_rows: int,
    places: Sequence[int],
    table: SpsTable,
    draft_seconds: float,
    *,
    convex: bool = False,
) -> NDArray[np.float64]:
    """Expected tokens per second for each number of `places` (drafts verified in all), before anything is drafted.

    survival [W, G]: of W blocks of earlier rounds, whose mixture stands for the blocks to come. The likeliest drafts
    get the places, as in `make_plan`. Non-anticipating: nothing of the round itself is looked at. convex: on the
    convex curve below the measured one.
    """
    gains = np.sort(np.asarray(survival, dtype=np.float64), axis=None)[::-1]
    admitted = np.concatenate([[0.0], np.cumsum(gains)])
    blocks_each = np.shape(survival)[0] / num_requests
    wanted = np.asarray(places) * blocks_each
    tokens = num_requests + np.interp(wanted, np.arange(admitted.size), admitted) / blocks_each
    seconds = 1.0 / table.sps_range(base_rows, max(places) + 1, convex=convex)[np.asarray(places)]
    return np.asarray(tokens / (seconds + draft_seconds))


def _first_peak(rates: list[float]) -> int:
    """Steps that can be made from the start with `rates` rising at each."""
    return next((n for n, (now, then) in enumerate(itertools.pairwise(rates)) if then <= now), len(rates) - 1)
