"""The picture of a training run."""

from __future__ import annotations

import json
import logging
from pathlib import Path

log = logging.getLogger(__name__)


def plot_metrics(metrics: Path, image: Path) -> bool:
    """Loss and tau over steps. Returns False (and says so) where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        log.warning("no plot: matplotlib is not installed (pip install 'exactspec[plot]')")
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "loss" in line]
    heldout = [line for line in lines if "heldout_tau_t1" in line]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    left.plot([s["step"] for s in steps], [s["loss"] for s in steps])
    left.set(xlabel="step", ylabel="loss")
    right.plot([s["step"] for s in steps], [s["tau_t1"] for s in steps], alpha=0.4, label="training, T=1")
    for key, label in (("heldout_tau_t1", "held out, T=1"), ("heldout_tau_t0", "held out, T=0")):
        right.plot([h["step"] for h in heldout], [h[key] for h in heldout], marker="o", label=label)
    right.set(xlabel="step", ylabel="accept length (incl. bonus), teacher-forced")
    right.legend()
    figure.tight_layout()
    figure.savefig(image, dpi=120)
    plt.close(figure)
    return True
