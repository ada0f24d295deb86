"""The training loop: frozen target online, draft blocks, losses, two optimizers, checkpoints, metrics."""

from __future__ import annotations

import json
import logging
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from exactspec.draft.block_model import BlockModel
from exactspec.draft.files import write_text
from exactspec.errors import ExactSpecError
from exactspec.train.blocks import BlockBatch, Prefetcher, make_blocks
from exactspec.train.data import BatchOrder, Sequences, make_batch
from exactspec.train.frozen import FrozenTarget
from exactspec.train.objective import Outcome, acceptance_by_position, evaluate, tau_of
from exactspec.train.optim import Optimizers
from exactspec.train.options import TrainOptions
from exactspec.train.ranks import Ranks
from exactspec.train.state import Progress, load_state, newest_state, save_state

log = logging.getLogger(__name__)
Report = Callable[[dict[str, Any]], None]


class TrainingError(ExactSpecError):
    """Training cannot go on; the message says what is kept."""


class Trainer:
    """Owns the draft network and what is needed to improve it. `run` returns the last metrics."""

    def __init__(
        self,
        options: TrainOptions,
        target: FrozenTarget,
        model: BlockModel,
        training: Sequences,
        heldout: Sequences,
        ranks: Ranks,
        facts: dict[str, Any],
        report: Report,
    ) -> None:
        self.options = options
        self.recipe = options.recipe
        self.target = target
        self.device = target.device
        self.model = model.to(self.device)
        self.optimizers = Optimizers(self.model, self.recipe)
        if options.compile:
            _compile_layers(self.model)
        self.training = training
        self.heldout = heldout
        self.ranks = ranks
        self.facts = facts
        self.report = report
        self.state_root = options.out / "state"
        self.progress = Progress()
        self.interrupted = False
        saved = newest_state(self.state_root) if options.resume else None
        if saved is not None:
            self.progress = load_state(saved, self.model, self.optimizers, facts)
            log.info("resuming from %s", saved)

    def run(self) -> dict[str, Any]:
        """Trains to the end (or the interruption, which leaves a checkpoint)."""
        self._drop_later_metrics()
        order = BatchOrder(
            self.training.lengths.clamp(max=self.recipe.max_sequence),
            self.recipe.batch_sequences,
            self.recipe.batch_tokens,
            self.options.seed,
            self.ranks.rank,
            self.ranks.world_size,
        )
        start = self.progress.step
        source = Prefetcher(order.batches(start), self._prepare, start)
        metrics: dict[str, Any] = {}
        try:
            with self._interruptible():
                metrics = self._loop(source)
        except torch.OutOfMemoryError as error:
            raise TrainingError(
                f"out of memory at step {self.progress.step}: lower batch_tokens ({self.recipe.batch_tokens}), "
                f"batch_sequences ({self.recipe.batch_sequences}) or num_anchors ({self.recipe.num_anchors}). "
                f"{self._what_is_kept()} ({error})"
            ) from error
        finally:
            source.close()
        return metrics

    def _loop(self, source: Prefetcher) -> dict[str, Any]:
        options, done = self.options, self.progress
        begun = time.monotonic() - done.seconds
        step, metrics = done.step, {}
        window = _Window(self.device)
        while step < self.recipe.steps and not self._is_stopped(step):
            blocks = next(source).to(self.device)
            rate = self.optimizers.rate(step, self._share(step, time.monotonic() - begun))
            if rate <= 0.0 and step > self.recipe.warmup_steps:
                break
            outcome, norm = self._step(blocks, rate)
            step += 1
            self.progress = Progress(step, time.monotonic() - begun)
            window.add(outcome, norm, blocks)
            last = step >= self.recipe.steps
            if step % options.log_every == 0 or last:
                metrics = self._log(window, outcome, blocks, rate)
                window = _Window(self.device)
            if step % options.heldout_every == 0 and not last:
                self._emit({"step": step, **self.measure_heldout()})
            if step % options.checkpoint_every == 0 and not last:
                self._check_finite(window)
                self.save()
        self._check_finite(window)
        self.save()
        return {**metrics, **self._emit({"step": step, **self.measure_heldout()})}

    def _is_stopped(self, step: int) -> bool:
        """Whether Ctrl-C came. Several processes must leave at the same step: they ask each other now and then."""
        if self.ranks.world_size > 1:
            if step % self.options.log_every:
                return False
            self.interrupted = self.ranks.any(self.interrupted)
        return self.interrupted

    def _share(self, step: int, seconds: float) -> float:
        """How much of the run is over, by steps or by time (the first process's clock), whichever is further."""
        by_steps = step / self.recipe.steps
        if self.options.max_seconds is None:
            return by_steps
        return max(by_steps, self.ranks.from_first(seconds) / self.options.max_seconds)

    def _step(self, blocks: BlockBatch, rate: float) -> tuple[Outcome, torch.Tensor]:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            outcome = evaluate(self.model, self.target, blocks, self.recipe)
        outcome.loss.backward()
        self.ranks.average_gradients(self.optimizers.params)
        return outcome, self.optimizers.step(rate)

    def _prepare(self, step: int, indices: list[int]) -> BlockBatch:
        rng = np.random.default_rng((self.options.seed, 1, step, self.ranks.rank))
        batch = make_batch(self.training, indices, self.recipe.max_sequence)
        return make_blocks(batch, self.recipe.num_anchors, self.recipe.gamma, self.recipe.loss_decay, rng)

    # ------------------------------------------------------------------------------------------ reporting

    def _log(self, window: _Window, outcome: Outcome, blocks: BlockBatch, rate: float) -> dict[str, Any]:
        self._check_finite(window)
        step, seconds = self.progress.step, self.progress.seconds
        left = seconds / max(step, 1) * (self.recipe.steps - step)
        if self.options.max_seconds is not None:
            left = min(left, self.options.max_seconds - seconds)
        return self._emit(
            {
                "step": step,
                "seconds": round(seconds, 2),
                "seconds_left": round(max(left, 0.0), 1),
                "rate": round(rate, 5),
                **window.means(),
                **measures([(outcome, blocks)], self.recipe.gamma, ""),
            }
        )

    def _emit(self, metrics: dict[str, Any]) -> dict[str, Any]:
        if self.ranks.is_first:
            path = self.options.out / "metrics.jsonl"
            try:
                with open(path, "a", encoding="utf-8") as file:
                    file.write(json.dumps(metrics) + "\n")
            except OSError as error:
                raise TrainingError(f"{path}: cannot be written ({error}). {self._what_is_kept()}") from error
            self.report(metrics)
        return metrics

    def _drop_later_metrics(self) -> None:
        """After a resume, lines of steps that are about to be done again go."""
        path = self.options.out / "metrics.jsonl"
        if self.ranks.is_first and path.exists():
            lines = path.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if (_step_of(line) or math.inf) <= self.progress.step]
            write_text(path, "".join(line + "\n" for line in kept))
        self.ranks.barrier()

    @torch.no_grad()
    def measure_heldout(self) -> dict[str, Any]:
        """Teacher-forced measures on sequences that are never trained on; the same blocks every time."""
        results = []
        order = BatchOrder(
            self.heldout.lengths.clamp(max=self.recipe.max_sequence),
            self.recipe.batch_sequences,
            self.recipe.batch_tokens,
            0,
        )
        for number, indices in enumerate(order.epoch(0)):
            rng = np.random.default_rng((0, number))
            batch = make_batch(self.heldout, indices, self.recipe.max_sequence)
            blocks = make_blocks(batch, self.recipe.num_anchors, self.recipe.gamma, self.recipe.loss_decay, rng)
            blocks = blocks.to(self.device)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                results.append((evaluate(self.model, self.target, blocks, self.recipe), blocks))
        return measures(results, self.recipe.gamma, "heldout_")

    # ------------------------------------------------------------------------------------------ keeping

    def save(self) -> None:
        if not all(bool(param.isfinite().all()) for param in self.model.parameters()):
            raise self._not_finite()
        if self.ranks.is_first:
            save_state(self.state_root, self.model, self.optimizers, self.progress, self.facts)
        self.ranks.barrier()

    def _what_is_kept(self) -> str:
        saved = newest_state(self.state_root)
        return f"The last checkpoint is {saved}" if saved else "No checkpoint was written yet"

    def _check_finite(self, window: _Window) -> None:
        if not window.is_finite():
            raise self._not_finite()

    def _not_finite(self) -> TrainingError:
        return TrainingError(
            f"loss or weights are not finite at step {self.progress.step}: lower muon_lr ({self.recipe.muon_lr}) or "
            f"adam_lr ({self.recipe.adam_lr}), or lengthen warmup_steps. {self._what_is_kept()}"
        )

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """The first Ctrl-C ends the loop after its step, with a checkpoint; the second one acts at once."""

        def on_signal(number: int, frame: Any) -> None:
            self.interrupted = True
            signal.signal(number, previous)

        try:
            previous = signal.signal(signal.SIGINT, on_signal)
        except ValueError:  # not the main thread: whoever owns it decides
            yield
            return
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)


def _step_of(line: str) -> int | None:
    """The step of a line of metrics; None for half a line, which a run that was killed may leave."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None


def _compile_layers(model: BlockModel) -> None:
    """Sequence lengths vary: one graph with symbolic sizes for all of them."""
    import torch._inductor.config as inductor

    if hasattr(inductor.triton, "coalesce_tiling_analysis"):
        inductor.triton.coalesce_tiling_analysis = False  # torch 2.11: fails on these symbolic shapes
    for layer in model.layers:
        layer.compile(dynamic=True)


class _Window:
    """Sums since the last report, kept on the device: reading them back is the only wait."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(4, device=device)
        self.steps = 0
        self.tokens = 0
        self.sequences = 0
        self.started = time.monotonic()

    def add(self, outcome: Outcome, norm: torch.Tensor, blocks: BlockBatch) -> None:
        weight = blocks.weight
        ce, l1 = (outcome.ce * weight).sum(), (outcome.l1 * weight).sum()
        self.sums += torch.stack([outcome.loss.detach(), ce, l1, norm])
        self.steps += 1
        self.tokens += blocks.token_ids.numel()
        self.sequences += blocks.token_ids.shape[0]

    def is_finite(self) -> bool:
        return all(math.isfinite(value) for value in self.sums.tolist())

    def means(self) -> dict[str, float]:
        loss, ce, l1, norm = (self.sums / max(self.steps, 1)).tolist()
        seconds = max(time.monotonic() - self.started, 1e-9)
        return {
            "loss": round(loss, 5),
            "ce": round(ce, 5),
            "l1": round(l1, 5),
            "grad_norm": round(norm, 5),
            "tokens_per_second": round(self.tokens / seconds),
            "sequences_per_second": round(self.sequences / seconds, 1),
        }


def measures(results: list[tuple[Outcome, BlockBatch]], gamma: int, prefix: str) -> dict[str, Any]:
    """tau_t1 (rejection sampling at temperature 1), tau_t0 (greedy), tau_coupled (common noise at temperature 1, where
    the recipe has a term for it) and acceptance by position, all conditional on the text that the target wrote."""
    tau1, tau0, tau_coupled, blocks_total = 0.0, 0.0, 0.0, 0
    sums, counts = torch.zeros(gamma), torch.zeros(gamma)
    for outcome, blocks in results:
        weight = blocks.num_blocks
        one, zero = float(tau_of(blocks, outcome.accept, gamma)), float(tau_of(blocks, outcome.match, gamma))
        if math.isfinite(one):
            tau1, tau0, blocks_total = tau1 + weight * one, tau0 + weight * zero, blocks_total + weight
            if outcome.agree is not None:
                tau_coupled += weight * float(tau_of(blocks, outcome.agree, gamma))
        part_sums, part_counts = acceptance_by_position(blocks, outcome.accept, gamma)
        sums, counts = sums + part_sums.cpu(), counts + part_counts.cpu()
    return {
        f"{prefix}tau_t1": round(tau1 / max(blocks_total, 1), 4),
        f"{prefix}tau_t0": round(tau0 / max(blocks_total, 1), 4),
        **({f"{prefix}tau_coupled": round(tau_coupled / max(blocks_total, 1), 4)} if tau_coupled else {}),
        f"{prefix}acceptance": [round(x, 4) for x in (sums / counts.clamp(min=1)).tolist()],
    }
