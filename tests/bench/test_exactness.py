"""What `exactspec check` calls a difference."""

from __future__ import annotations

import math

import pytest

from exactspec.bench.exactness import largest_difference
from exactspec.types import TokenLogprob

ONE = [TokenLogprob(7, -1.0, ((7, -1.0), (9, -2.0))), TokenLogprob(8, -0.5, ((8, -0.5), (3, -math.inf)))]


def with_second(logprob: float | None, top: float) -> list[TokenLogprob]:
    return [ONE[0], TokenLogprob(8, logprob, ((8, top), (3, -math.inf)))]


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (ONE, 0.0),
        (with_second(-0.5, -0.75), 0.25),
        (with_second(-0.5, math.nextafter(-0.5, 0)), 2.0**-54),
        (with_second(math.nan, -0.5), math.inf),  # not a number is no match, whatever max() makes of it
        (with_second(-0.5, -math.inf), math.inf),
        (with_second(None, -0.5), math.inf),
        ([ONE[0], TokenLogprob(8, -0.5, ((3, -0.5), (8, -math.inf)))], math.inf),  # other alternatives
        (ONE[:1], math.inf),
    ],
)
def test_only_equal_floats_are_no_difference(other: list[TokenLogprob], difference: float) -> None:
    assert largest_difference(ONE, other) == difference
    assert largest_difference(other, ONE) == difference
