"""The steps-per-second curve: how long a target step takes by its number of rows, on this device, for this model."""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from exactspec.errors import ConfigError

FORMAT = 1
DENSE_ROWS = 4096  # rows that are looked up in an array


@dataclass(frozen=True)
class SpsKey:
    """What a curve was measured on. A curve serves nothing else."""

    device: str
    dtype: str
    model: str
    engine_version: str


@dataclass(frozen=True)
class SpsTable:
    """`seconds[i]` is the time of a step of `rows[i]` rows, never falling with the rows.

    Between measured points time is interpolated, before the first it is the first's, behind the last it grows on with
    the mean slope of the curve's second half (one point: in proportion). Measured curves are staircases: measure
    every row count that matters.
    """

    key: SpsKey
    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_curve(self.rows, self.seconds)

    @cached_property
    def _dense(self) -> NDArray[np.float64]:
        return 1.0 / _times(np.arange(DENSE_ROWS + 1), self.rows, self.seconds)

    @cached_property
    def _convex(self) -> NDArray[np.float64]:
        return 1.0 / _times(np.arange(DENSE_ROWS + 1), *convex_minorant(self.rows, self.seconds))

    @classmethod
    def from_measurements(cls, key: SpsKey, rows: Sequence[int], seconds: Sequence[float]) -> SpsTable:
        """Sorts by rows and smooths the times to the nearest non-falling curve (least squares)."""
        order = sorted(range(len(rows)), key=lambda i: rows[i])
        times = [float(seconds[i]) for i in order]
        if not all(math.isfinite(t) and t > 0 for t in times):
            raise ConfigError(f"SPS table: measured seconds must be positive and finite, got {times}")
        return cls(key, tuple(int(rows[i]) for i in order), tuple(isotonic(times)))

    def sps(self, rows: int) -> float:
        """Steps per second at so many rows."""
        return float(self.sps_range(rows, 1)[0])

    def sps_range(self, first: int, count: int, *, convex: bool = False) -> NDArray[np.float64]:
        """Steps per second at first, first + 1, ... (`count` values).

        convex: of the largest convex curve of times that is nowhere above the measured one. It touches the ends of
        the stairs, and tokens per second over it have one peak only.
        """
        if first < 0 or count < 0:
            raise ConfigError(f"SPS table: no rows {first} .. {first + count - 1}")
        if first + count <= DENSE_ROWS + 1:
            return (self._convex if convex else self._dense)[first : first + count]
        curve = convex_minorant(self.rows, self.seconds) if convex else (self.rows, self.seconds)
        return 1.0 / _times(np.arange(first, first + count), *curve)

    def check_key(self, expected: SpsKey) -> None:
        """Raises ConfigError that names the first difference."""
        for name, value in asdict(expected).items():
            found = getattr(self.key, name)
            if found != value:
                raise ConfigError(f"SPS table: it was measured for {name} {found!r}, this engine has {value!r}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes JSON, whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"format": FORMAT, "key": asdict(self.key), "rows": self.rows, "seconds": self.seconds}
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(content, file, indent=1)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: str | os.PathLike[str], expected: SpsKey | None = None) -> SpsTable:
        """Raises ConfigError, naming the file, for a damaged table or one of another engine (`expected`)."""
        try:
            content = json.loads(Path(path).read_text())
            if content["format"] != FORMAT:
                raise ConfigError(f"SPS table: format {content['format']!r}, this version reads {FORMAT}")
            key = SpsKey(**{name: str(value) for name, value in content["key"].items()})
            rows, seconds = content["rows"], content["seconds"]
            if not all(type(r) is int for r in rows) or not all(type(s) in (int, float) for s in seconds):
                raise ConfigError("SPS table: rows must be integers and seconds numbers")
            table = cls(key, tuple(rows), tuple(float(s) for s in seconds))
            if expected is not None:
                table.check_key(expected)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}: not a readable SPS table ({error!r})") from error
        return table


def _check_curve(rows: Sequence[int], seconds: Sequence[float]) -> None:
    if not rows or len(rows) != len(seconds):
        raise ConfigError(f"SPS table: {len(rows)} row counts and {len(seconds)} times")
    if rows[0] < 1 or any(b <= a for a, b in itertools.pairwise(rows)):
        raise ConfigError(f"SPS table: rows must rise from at least 1, got {list(rows)}")
    if not all(math.isfinite(s) and s > 0 for s in seconds):
        raise ConfigError(f"SPS table: seconds must be positive and finite, got {list(seconds)}")
    if any(b < a for a, b in itertools.pairwise(seconds)):
        raise ConfigError("SPS table: seconds fall where rows rise; smooth the measurements first")


def _times(rows: NDArray[np.int64], known: Sequence[int], seconds: Sequence[float]) -> NDArray[np.float64]:
    """Seconds at `rows`, interpolated; see SpsTable for what holds outside of `known`."""
    x, y = np.asarray(known, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    slope = y[0] / x[0]
    if x.size > 1:
        half = (x.size - 1) // 2
        slope = (y[-1] - y[half]) / (x[-1] - x[half])
    return np.interp(rows, x, y) + slope * np.maximum(rows - x[-1], 0.0)


def convex_minorant(rows: Sequence[int], seconds: Sequence[float]) -> tuple[list[int], list[float]]:
    """Vertices of the lower convex hull of the points (monotone chain)."""
    hull: list[tuple[int, float]] = []
    for x, y in zip(rows, seconds, strict=True):
        while len(hull) > 1:
            (x0, y0), (x1, y1) = hull[-2:]
            if (y1 - y0) * (x - x1) < (y - y1) * (x1 - x0):
                break
            hull.pop()
        hull.append((x, y))
    return [x for x, _ in hull], [y for _, y in hull]


def isotonic(values: Sequence[float]) -> list[float]:
    """The non-falling sequence nearest to `values` in least squares (pool adjacent violators)."""
    blocks: list[tuple[float, int]] = []  # mean, length
    for value in values:
        mean, length = float(value), 1
        while blocks and blocks[-1][0] > mean:
            other, count = blocks.pop()
            mean = (mean * length + other * count) / (length + count)
            length += count
        blocks.append((mean, length))
    return [mean for mean, length in blocks for _ in range(length)]


def measure_steps(
    run_step: Callable[[int], object],
    rows: Sequence[int],
    *,
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Median seconds of run_step(n) for each n of `rows`; the first run of each is not counted.

    run_step must return only when the device is done. Rounds go over all row counts in turn, so that a slow moment
    of the machine hits single runs of many counts and not all runs of one.
    """
    for count in rows:
        run_step(count)
    times: list[list[float]] = [[] for _ in rows]
    for _ in range(max(1, repeats)):
        for index, count in enumerate(rows):
            start = clock()
            run_step(count)
            times[index].append(clock() - start)
    return [statistics.median(runs) for runs in times]
