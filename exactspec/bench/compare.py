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
            )
        )
    return lines


def write_json(path: Path, lines: Sequence[Line], facts: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"facts": facts, "lines": [asdict(line) for line in lines]}, indent=1) + "\n")


def write_plot(path: Path, lines: Sequence[Line]) -> None:
    """Bars of tokens/s, one panel per prompt file. Needs the extra `plot`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    files = list(dict.fromkeys(line.prompts for line in lines))
    figure, axes = pyplot.subplots(1, len(files), figsize=(1.5 + 3.4 * len(files), 3.6), squeeze=False, sharey=True)
    for axis, name in zip(axes[0], files, strict=True):
        mine = [line for line in lines if line.prompts == name]
        bars = axis.bar([line.contender for line in mine], [line.tokens_per_second for line in mine], color="#4477aa")
        axis.bar_label(bars, labels=[f"{line.ratio:.2f}x" for line in mine], fontsize=8)
        axis.set_title(name, fontsize=10)
        axis.tick_params(axis="x", rotation=60, labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("output tokens / s")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
