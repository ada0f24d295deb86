"""The steps-per-second curve: smoothing, interpolation, the file."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exactspec.errors import ConfigError
from exactspec.verify.sps import SpsKey, SpsTable, convex_minorant, isotonic, measure_steps

KEY = SpsKey("cpu", "bfloat16", "toy", "0.1.0")
times = st.lists(st.floats(0.001, 10), min_size=1, max_size=12)


@given(times)
def test_smoothing_gives_the_nearest_curve_that_never_falls(values: list[float]) -> None:
    smooth = isotonic(values)
    assert all(b >= a for a, b in itertools.pairwise(smooth))
    assert sum(smooth) == pytest.approx(sum(values))

    def distance(curve: list[float]) -> float:
        return sum((a - b) ** 2 for a, b in zip(curve, values, strict=True))

    best = distance(smooth)
    for other in (list(np.maximum.accumulate(values)), list(np.minimum.accumulate(values[::-1])[::-1])):
        assert best <= distance(other) + 1e-12
    if all(b >= a for a, b in itertools.pairwise(values)):
        assert smooth == values


@given(times)
def test_the_convex_curve_is_convex_below_the_other_and_touches_it(values: list[float]) -> None:
    seconds = isotonic(values)
    rows = list(range(1, len(seconds) + 1))
    hull_rows, hull_seconds = convex_minorant(rows, seconds)
    on_all = np.interp(rows, hull_rows, hull_seconds)
    assert (on_all <= np.array(seconds) + 1e-12).all()
    assert set(zip(hull_rows, hull_seconds, strict=True)) <= set(zip(rows, seconds, strict=True))
    assert (np.diff(on_all, 2) >= -1e-9).all()


def test_measurements_may_come_in_any_order_and_with_noise() -> None:
    table = SpsTable.from_measurements(KEY, [4, 1, 2], [0.4, 0.2, 0.1])
    assert table.rows == (1, 2, 4)
    assert table.seconds == pytest.approx((0.15, 0.15, 0.4))


def test_times_between_before_and_behind_the_measured_rows() -> None:
    table = SpsTable(KEY, (2, 4, 8), (1.0, 2.0, 3.0))
    seconds = {rows: 1 / table.sps(rows) for rows in (0, 1, 2, 3, 4, 6, 8, 12, 10_000)}
    assert seconds == pytest.approx(
        {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.5, 4: 2.0, 6: 2.5, 8: 3.0, 12: 4.0, 10_000: 3.0 + 9992 / 4}
    )
    assert table.sps_range(0, 5001).tolist() == pytest.approx([table.sps(rows) for rows in range(5001)])
    assert 1 / SpsTable(KEY, (4,), (2.0,)).sps(8) == pytest.approx(4.0)


def test_the_file_comes_back_as_it_was(tmp_path) -> None:
    table = SpsTable.from_measurements(KEY, range(1, 40), [0.1 + 0.01 * (n // 8) for n in range(39)])
    path = tmp_path / "new folder" / "sps.json"
    table.save(path)
    assert SpsTable.load(path, KEY) == table
    assert [file.name for file in path.parent.iterdir()] == ["sps.json"]


@pytest.mark.parametrize("name", ["device", "dtype", "model", "engine_version"])
def test_a_table_of_another_engine_is_refused(tmp_path, name: str) -> None:
    path = tmp_path / "sps.json"
    SpsTable(KEY, (1,), (1.0,)).save(path)
    other = SpsKey(**{**vars(KEY), name: "other"})
    with pytest.raises(ConfigError, match=f"sps.json.*{name}.*'other'"):
        SpsTable.load(path, other)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": 2}, "format 2"),
        ({"rows": [1, 2]}, "2 row counts and 3 times"),
        ({"rows": [1, 3, 3]}, "must rise"),
        ({"rows": [0, 1, 2]}, "at least 1"),
        ({"rows": [1, 2, 3.5]}, "integers"),
        ({"rows": [1, True, 3]}, "integers"),
        ({"seconds": [1.0, 0.5, 2.0]}, "fall"),
        ({"seconds": [1.0, 2.0, float("nan")]}, "finite"),
        ({"seconds": [0.0, 2.0, 3.0]}, "positive"),
        ({"seconds": "fast"}, "numbers"),
        ({"key": {"device": "cpu"}}, "not a readable"),
        ({"key": None}, "not a readable"),
    ],
)
def test_a_damaged_file_is_refused_with_its_name(tmp_path, change: dict, reason: str) -> None:
    path = tmp_path / "sps.json"
    SpsTable(KEY, (1, 2, 3), (1.0, 2.0, 3.0)).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=reason) as refusal:
        SpsTable.load(path)
    assert "sps.json" in str(refusal.value)


def test_no_file_and_no_json(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.json"):
        SpsTable.load(tmp_path / "missing.json")
    (tmp_path / "half.json").write_text('{"format": 1, "rows"')
    with pytest.raises(ConfigError, match=r"half\.json"):
        SpsTable.load(tmp_path / "half.json")


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch) -> None:
    path = tmp_path / "sps.json"
    old = SpsTable(KEY, (1,), (1.0,))
    old.save(path)

    def full(*_args, **_options) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(json, "dump", full)
    with pytest.raises(OSError, match="disk full"):
        SpsTable(KEY, (1,), (2.0,)).save(path)
    assert SpsTable.load(path) == old
    assert len(list(tmp_path.iterdir())) == 1


def test_measuring_takes_medians_and_warms_up() -> None:
    now, calls = 0.0, []

    def step(rows: int) -> None:
        nonlocal now
        calls.append(rows)
        slow = 100.0 if len(calls) in (1, 2, 5) else 0.0  # the warm-up, and one hiccup
        now += rows + slow

    assert measure_steps(step, [1, 2], repeats=3, clock=lambda: now) == [1.0, 2.0]
    assert calls == [1, 2] * 4
