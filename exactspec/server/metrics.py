"""Prometheus metrics: times seen by clients, and the engine's own counters as they arrive."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

TIMES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300)
INTERVALS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)

GAUGES = {
    "num_running": "requests in the running batch",
    "num_waiting": "requests in the queue",
    "num_pages": "K/V pages",
    "free_pages": "K/V pages that are free",
    "cached_pages": "K/V pages held by the prefix cache",
    "accept_length": "tokens committed per round since the last flush, bonus included",
}
COUNTERS = {
    "num_steps": "engine steps",
    "step_seconds": "seconds spent in engine steps",
    "prompt_tokens": "prompt tokens prefilled",
    "cached_tokens": "prompt tokens taken from the prefix cache",
    "output_tokens": "output tokens",
    "num_retractions": "requests sent back to the queue for lack of pages",
    "num_rounds": "draft and verify rounds since the last flush",
    "num_drafted": "draft tokens proposed since the last flush",
    "num_verified": "draft tokens verified since the last flush",
    "num_accepted": "draft tokens accepted since the last flush",
}


class EngineCollector:
    """Shows the newest EngineStats at every scrape."""

    def __init__(self, stats: Callable[[], dict[str, Any]]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Any]:
        stats = self._stats()
        for name, text in GAUGES.items():
            if stats.get(name) is not None:
                yield GaugeMetricFamily(f"exactspec_{name}", text, value=stats[name])
        for name, text in COUNTERS.items():
            if stats.get(name) is not None:
                yield CounterMetricFamily(f"exactspec_{name}", text, value=stats[name])
        accepted = {int(k): v for k, v in (stats.get("accepted_histogram") or {}).items()}
        verified = {int(k): v for k, v in (stats.get("verified_histogram") or {}).items()}
        if accepted:
            yield _histogram("exactspec_accepted_drafts", "draft tokens accepted in a round", accepted)
            yield _by_position(accepted, verified)


def _histogram(name: str, text: str, counts: dict[int, int]) -> HistogramMetricFamily:
    total, buckets = 0, []
    for size in range(max(counts) + 1):
        total += counts.get(size, 0)
        buckets.append((str(float(size)), float(total)))
    buckets.append(("+Inf", float(total)))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=float(sum(k * v for k, v in counts.items())))


def _by_position(accepted: dict[int, int], verified: dict[int, int]) -> GaugeMetricFamily:
    """Share of rounds that accepted draft k, among those that verified at least k drafts (not conditional)."""
    family = GaugeMetricFamily(
        "exactspec_acceptance_by_position", "share of rounds accepting the draft at this position", labels=["position"]
    )
    for position in range(1, max(verified, default=0) + 1):
        tried = sum(count for length, count in verified.items() if length >= position)
        kept = sum(count for length, count in accepted.items() if length >= position)
        family.add_metric([str(position)], kept / tried if tried else 0.0)
    return family


class Intervals:
    """A histogram over INTERVALS that is cheap to add to: it is, for every step of every request."""

    def __init__(self, name: str, text: str) -> None:
        self._name, self._text = name, text
        self._counts = [0] * (len(INTERVALS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, tokens: int) -> None:
        """So many tokens that came together, `seconds` after those before them."""
        self._counts[bisect_left(INTERVALS, seconds / (tokens or 1))] += tokens
        self._sum += seconds

    def collect(self) -> Iterable[HistogramMetricFamily]:
        totals = accumulate(self._counts)
        bounds = [*map(str, INTERVALS), "+Inf"]
        buckets = [(bound, float(total)) for bound, total in zip(bounds, totals, strict=True)]
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


class Metrics:
    """All metrics of one server."""

    def __init__(self, stats: Callable[[], dict[str, Any]]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(stats))
        ProcessCollector(registry=self.registry)  # of the HTTP process: processor time, memory, open files
        self.requests = Counter("exactspec_requests", "HTTP answers", ["route", "status"], registry=self.registry)
        self.finishes = Counter("exactspec_finishes", "finished samples", ["reason"], registry=self.registry)
        self.errors = Counter("exactspec_errors", "refusals and failures", ["kind"], registry=self.registry)
        self.first_token = Histogram(
            "exactspec_time_to_first_token_seconds", "arrival to first token", buckets=TIMES, registry=self.registry
        )
        self.interval = Intervals("exactspec_inter_token_latency_seconds", "seconds a token, the mean of its step")
        self.registry.register(self.interval)
        self.latency = Histogram(
            "exactspec_e2e_request_latency_seconds", "arrival to last token", buckets=TIMES, registry=self.registry
        )

    def observe(self, sample: Any, num_tokens: int, before: float | None, now: float) -> None:
        """A step has brought `num_tokens` to a sample; `before` is when its previous tokens came."""
        if num_tokens and before is None:
            self.first_token.observe(now - sample.started)
            self.interval.observe(0.0, num_tokens - 1)
        elif num_tokens:
            self.interval.observe(now - before, num_tokens)  # type: ignore[operator]
        if sample.finish is not None:
            self.finishes.labels(sample.finish.kind).inc()
            self.latency.observe(now - sample.started)

    def render(self) -> bytes:
        return generate_latest(self.registry)
