"""`exactspec bench`: contenders on the same prompts in one run, taking turns prompt by prompt so that drift hits
all alike.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from exactspec.bench.contenders import Contender, Run
from exactspec.bench.peers import PEERS
from exactspec.errors import ConfigError


@dataclass(slots=True)
class Standing:
    """What one contender reached on one prompt file."""

    name: str
    runs: list[Run] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        seconds = sum(run.decode_seconds for run in self.runs)
        return sum(run.num_tokens for run in self.runs) / seconds if seconds else 0.0

    @property
    def first_token_ms(self) -> float:
        """Median over runs, of the time until every prompt of the group has its first token."""
        return statistics.median(run.first_token_seconds for run in self.runs) * 1e3

    @property
    def accept_length(self) -> float | None:
        """Mean over runs, incl. bonus, weighted by tokens; None where nothing was drafted."""
        known = [(run.accept_length, run.num_tokens) for run in self.runs if run.accept_length]
        rounds = sum(tokens / length for length, tokens in known)
        return sum(tokens for _, tokens in known) / rounds if rounds else None

    def ratios(self, other: Standing) -> list[float]:
        """Speed against `other`, prompt by prompt."""
        return [
            ours.tokens_per_second / theirs.tokens_per_second
            for ours, theirs in zip(self.runs, other.runs, strict=True)
            if theirs.tokens_per_second
        ]


def compare(
    contenders: Sequence[Contender],
    groups: Sequence[Sequence[Sequence[int]]],
    *,
    new_tokens: int,
    temperature: float,
    seed: int = 0,
    warm_up: int = 16,
    on_run: Callable[[str], None] | None = None,
) -> list[Standing]:
    """Runs every group of prompts through every contender; the starting contender rotates.

    warm_up: output tokens of a run of the first group that does not count (0: none).
    """
    standings = [Standing(contender.name) for contender in contenders]
    if warm_up:
        for contender in contenders:
            contender.run(groups[0], min(new_tokens, warm_up), temperature, seed)
    for number, group in enumerate(groups):
        for turn in range(len(contenders)):
            at = (turn + number) % len(contenders)
            standings[at].runs.append(contenders[at].run(group, new_tokens, temperature, seed + number))
            if on_run is not None:
                on_run(contenders[at].name)
    return standings


@dataclass(slots=True)
class Line:
    """One row of the table. Spread: quartiles of the per-prompt ratio."""

    prompts: str
    contender: str
    tokens_per_second: float
    accept_length: float | None
    ratio: float
    ratio_low: float
    ratio_high: float
    first_token_ms: float = 0.0  # 0 in figures from before it was told


def table(prompts: str, standings: Sequence[Standing], base: str) -> list[Line]:
    """Lines relative to the contender named `base`."""
    reference = next(standing for standing in standings if standing.name == base)
    lines = []
    for standing in standings:
        ratios = sorted(standing.ratios(reference)) or [0.0]
        quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
        lines.append(
            Line(
                prompts,
                standing.name,
                standing.tokens_per_second,
                standing.accept_length,
                standing.tokens_per_second / reference.tokens_per_second,
                quartiles[0],
                quartiles[2],
                standing.first_token_ms,
            )
        )
    return lines


def write_json(path: Path, lines: Sequence[Line], facts: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"facts": facts, "lines": [asdict(line) for line in lines]}, indent=1) + "\n")


def read_json(path: Path) -> tuple[list[Line], dict[str, Any]]:
    """What write_json wrote. Raises ConfigError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return [Line(**line) for line in content["lines"]], content["facts"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path}: holds no figures of a bench ({error})") from None


def write_plot(path: Path, lines: Sequence[Line], facts: dict[str, Any]) -> None:
    """Bars of tokens/s, one panel per prompt file; where steps were timed (`facts`), their times by rows beside them.
    Needs the extra `plot`."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("plot: needs matplotlib: pip install 'exactspec[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "exactspec"  # the same figures give the same file
    files = list(dict.fromkeys(line.prompts for line in lines))
    widest = max(sum(line.prompts == name for line in lines) for name in files)
    panels = len(files) + ("step_ms" in facts)
    figure, axes = pyplot.subplots(1, panels, figsize=(0.6 + panels * (1.2 + 0.6 * widest), 3.4), squeeze=False)
    for axis, name in zip(axes[0], files, strict=False):
        _draw_speeds(axis, name, [line for line in lines if line.prompts == name])
        axis.set_ylim(0, 1.18 * max(line.tokens_per_second for line in lines))
    axes[0][0].set_ylabel("output tokens / s")
    if "step_ms" in facts:
        _draw_steps(axes[0][-1], {int(rows): ms for rows, ms in facts["step_ms"].items()}, facts["floor_ms"])
    for axis in axes[0]:
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _draw_speeds(axis: Any, name: str, lines: Sequence[Line]) -> None:
    colours = ["#999999" if line is lines[0] else "#ddaa66" if line.contender in PEERS else "#4477aa" for line in lines]
    bars = axis.bar([line.contender for line in lines], [line.tokens_per_second for line in lines], color=colours)
    labels = [f"{line.tokens_per_second:.0f}\n{line.ratio:.2f}x" for line in lines]
    axis.bar_label(bars, labels=labels, fontsize=8, padding=2)
    axis.set_title(name, fontsize=10)
    axis.tick_params(axis="x", rotation=0 if len(lines) < 5 else 60, labelsize=8)


def _draw_steps(axis: Any, step_ms: dict[int, float], floor_ms: float) -> None:
    """Times of target steps by rows, and the floor: reading all weights once."""
    axis.plot(list(step_ms), list(step_ms.values()), marker="o", markersize=4, color="#4477aa")
    axis.axhline(floor_ms, color="#999999", linewidth=1, linestyle="--")
    axis.text(max(step_ms), floor_ms, "floor", fontsize=8, color="#666666", ha="right", va="bottom")
    axis.set_xscale("log", base=2, subs=[])
    axis.set_xticks(list(step_ms), [str(rows) for rows in step_ms], fontsize=8)
    axis.set_ylim(0)
    axis.set_title("one step by its rows", fontsize=10)
    axis.set_xlabel("rows", fontsize=8)
    axis.set_ylabel("ms")
