"""The only place that knows drafters by name."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from exactspec.backend.base import Backend
from exactspec.draft.base import Drafter
from exactspec.draft.block import BlockDrafter
from exactspec.draft.calibration import read_calibration
from exactspec.draft.checkpoint import TargetFacts, check_fit, load_block_model
from exactspec.draft.config import CONFIG_FILE, read_draft_config
from exactspec.draft.ngram import NgramDrafter
from exactspec.draft.none import NoDrafter
from exactspec.draft.random_weights import random_draft
from exactspec.draft.vocabulary import read_draft_vocab
from exactspec.errors import CheckpointError, ConfigError
from exactspec.model.target import TargetModel

SHIPPED = Path(__file__).resolve().parent.parent / "drafts_data"  # NAME-TARGET folders inside the package
RANDOM = "random"  # a block draft of the target's shape with random weights
NAMES = ("none", "ngram", "dflash", "dspark")
DEFAULT_NGRAM_GAMMA = 7
log = logging.getLogger(__name__)


def make_drafter(
    draft: str | None,
    target: TargetModel,
    *,
    num_slots: int,
    gamma: int | None,
    backend: Backend,
    end_ids: Iterable[int] = (),
) -> Drafter:
    """draft: None or "none", "ngram", "dflash" or "dspark" (shipped for the built-in target), a checkpoint folder, or
    "random" (speed measurements, see simulate_accept_length).

    num_slots: slots of the target's K/V pool, whose indices the drafter's own pool shares. gamma: draft tokens per
    round, None for the drafter's own. end_ids: EOS and padding ids of the target, for a warning about mask tokens.
    Raises ConfigError for unknown names and impossible gammas, CheckpointError for damaged or unfit drafts.
    """
    if draft is None or draft == "none":
        return NoDrafter()
    if draft == "ngram":
        return NgramDrafter(DEFAULT_NGRAM_GAMMA if gamma is None else gamma)
    if draft == RANDOM:
        return BlockDrafter(random_draft(target.config), target, num_slots, gamma)
    facts = _facts(target, end_ids)
    folder = shipped_folder(draft, facts) if draft in NAMES else Path(draft).expanduser()
    if draft not in NAMES and not folder.is_dir():
        raise ConfigError(f"draft: {draft!r} is neither one of {', '.join(NAMES)} nor a checkpoint folder")
    if backend is not target.backend:
        raise ConfigError("draft: the drafter must run on the target's backend")
    model = load_block_model(folder)
    check_fit(model.config, facts, str(folder))
    calibration = read_calibration(folder, model.config.gamma)
    short_vocab = read_draft_vocab(folder, model.config.vocab_size)
    return BlockDrafter(model, target, num_slots, gamma, calibration, short_vocab)


def shipped_folder(name: str, target: TargetFacts) -> Path:
    """The shipped checkpoint NAME-* whose config fits the target. ConfigError says for which targets there is one."""
    made_for = []
    for folder in sorted(SHIPPED.glob(f"{name}-*")):
        if not (folder / CONFIG_FILE).exists():
            continue
        config = read_draft_config(folder)
        try:
            check_fit(config, target, str(folder))
        except CheckpointError:
            made_for.append(config.target_model or folder.name.removeprefix(f"{name}-"))
            continue
        log.info("draft %s: %s, made for %s", name, folder, config.target_model)
        return folder
    known = ", ".join(made_for) if made_for else "no target in this installation"
    raise ConfigError(
        f"draft: no {name} draft for this target is shipped (there is one for: {known}); "
        "give the folder of a draft checkpoint, or train one with `exactspec train`"
    )


def _facts(target: TargetModel, end_ids: Iterable[int]) -> TargetFacts:
    config = target.config
    return TargetFacts(config.hidden_size, config.num_layers, config.vocab_size, frozenset(end_ids))
