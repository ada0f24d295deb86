"""Settings of a training run. An algorithm is a row of `RECIPES`: data, never a branch in the code."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from exactspec.errors import ConfigError


@dataclass(frozen=True)
class Recipe:
    """What is trained and how. Rates are per step; losses and weights as in arXiv 2607.05147, sections 3.3 and 5.1.

    `sample_from_anchor`: the anchor row predicts the first draft token (DSpark: gamma rows), or the mask rows do
    (DFlash: gamma + 1 rows). `loss_decay`: the row that predicts draft token k weighs exp(-(k - 1) / loss_decay).
    """

    architecture: str  # name in config.json
    sample_from_anchor: bool
    markov_rank: int
    confidence_head: bool
    ce_weight: float
    l1_weight: float
    confidence_weight: float
    coupled_weight: float = 0.0  # of the chance that draws with common noise differ (`ops.distance_loss_`)
    coupled_temperature: float = 0.7
    gamma: int = 7
    num_layers: int = 4
    target_layer_ids: tuple[int, ...] | None = None  # None: five, spread evenly, never the last
    loss_decay: float = 4.0
    num_anchors: int = 64
    batch_sequences: int = 64
    batch_tokens: int = 40_960  # longer sequences come in smaller batches
    max_sequence: int = 1536
    steps: int = 10_000
    warmup_steps: int = 100
    muon_lr: float = 0.03
    adam_lr: float = 3e-3
    markov_lr_scale: float = 4.0
    clip: float = 1.0

    @property
    def block_rows(self) -> int:
        """Rows of one draft block, the anchor's row included."""
        return self.gamma if self.sample_from_anchor else self.gamma + 1


RECIPES: dict[str, Recipe] = {
    "dspark": Recipe("Qwen3DSparkModel", True, 64, True, ce_weight=0.1, l1_weight=0.9, confidence_weight=1.0),
    "dflash": Recipe("DFlashDraftModel", False, 0, False, ce_weight=1.0, l1_weight=0.0, confidence_weight=0.0),
}


def recipe_for(algorithm: str, **changes: object) -> Recipe:
    """The algorithm's recipe with some fields changed. Raises ConfigError for an unknown name or field."""
    if algorithm not in RECIPES:
        raise ConfigError(f"algorithm: {algorithm!r} is not one of {', '.join(RECIPES)}")
    _check(Recipe, changes)
    recipe: Recipe = replace(RECIPES[algorithm], **changes)  # type: ignore[arg-type]
    usual = RECIPES[algorithm]
    if recipe.sample_from_anchor != usual.sample_from_anchor:
        raise ConfigError(f"sample_from_anchor: {algorithm} and its published layout fix it")
    for name in ("markov_rank", "confidence_head"):
        if getattr(recipe, name) and not getattr(usual, name):
            raise ConfigError(f"{name}: the published layout of {algorithm} has no place for it")
    return recipe


@dataclass(frozen=True)
class DataOptions:
    """Where prompts come from and how the target answers them.

    `prompts`: a JSON-lines file ({"turns": [text, ...]}, {"prompt": text} or {"messages": [...]} a line; first turn
    only); None: the target writes them itself and templates add to them. `exclude`: files of the same form whose
    prompts must stay unseen: a training prompt that shares `exclude_words` words in a row with one is dropped.
    `temperatures`: (share, temperature) of the answers.
    """

    prompts: Path | None = None
    exclude: tuple[Path, ...] = ()
    exclude_words: int = 8
    num_self_prompts: int = 60_000
    num_template_prompts: int = 60_000
    num_long_prompts: int = 25_000
    max_prompt: int = 1400
    max_answer: int = 320
    temperatures: tuple[tuple[float, float], ...] = ((0.5, 1.0), (0.2, 0.7), (0.3, 0.0))
    heldout_share: float = 0.01
    slots: int = 4096  # sequences generated side by side, of up to slot_tokens tokens
    slot_tokens: int = 576
    memory_tokens: int = 2_359_296  # slots x tokens of the K/V cache of generation


@dataclass(frozen=True)
class TrainOptions:
    """One call of `exactspec train`."""

    target: str
    algorithm: str
    out: Path
    recipe: Recipe
    data: DataOptions = field(default_factory=DataOptions)
    data_folder: Path | None = None  # default: out / "data"; may be shared by several runs
    device: str = "auto"
    seed: int = 0
    mask_token_id: int | None = None  # None: a spare special token
    init_from: Path | None = None  # draft whose weights are the first ones (of the same shape, or with fewer layers)
    draft_vocab_size: int = 0  # only this many tokens, the most frequent in the answers, are drafted; 0: all
    resume: bool = True
    compile: bool = False  # torch.compile for the draft's layers: half a minute at the start, faster steps on CUDA
    log_every: int = 20
    heldout_every: int = 1000
    checkpoint_every: int = 1000
    max_seconds: float | None = None  # stop early (the rate reaches zero by then), counted from the first step

    @property
    def data_path(self) -> Path:
        return self.data_folder or self.out / "data"


def make_options(target: str, algorithm: str, out: str | Path, **settings: Any) -> TrainOptions:
    """Options from flat settings: names of Recipe and DataOptions fields go where they belong. Raises ConfigError
    naming the setting, before anything runs: a run may make data for hours before it reads some of them."""
    data_names = {f.name for f in fields(DataOptions)}
    run_names = {f.name for f in fields(TrainOptions)} - {"target", "algorithm", "out", "recipe", "data"}
    known = {f.name for f in fields(Recipe)} | data_names | run_names
    for name in settings:
        if name not in known:
            raise ConfigError(f"{name!r} is not a setting; the settings are {', '.join(sorted(known))}")
    _make_lists(settings)
    for name in _PATHS & settings.keys():
        settings[name] = None if settings[name] is None else Path(settings[name])
    data = {name: value for name, value in settings.items() if name in data_names}
    run = {name: value for name, value in settings.items() if name in run_names}
    recipe = {name: value for name, value in settings.items() if name not in data and name not in run}
    _check(DataOptions, data)
    _check(TrainOptions, run)
    return TrainOptions(
        target=target,
        algorithm=algorithm,
        out=Path(out),
        recipe=recipe_for(algorithm, **recipe),
        data=DataOptions(**data),
        **run,
    )


def _make_lists(settings: dict[str, Any]) -> None:
    """In place: one path or layer for a list of one; paths of files to exclude."""
    excluded = settings.get("exclude")
    if excluded is not None:
        one = isinstance(excluded, str | Path)
        settings["exclude"] = tuple(Path(path) for path in ((excluded,) if one else excluded))
    layers = settings.get("target_layer_ids")
    if isinstance(layers, int) and not isinstance(layers, bool):
        settings["target_layer_ids"] = (layers,)


_PATHS = {"prompts", "data_folder", "init_from"}
_FROM_ZERO = {
    "warmup_steps", "markov_rank", "seed", "mask_token_id", "draft_vocab_size", "num_self_prompts",
    "num_template_prompts", "num_long_prompts", "ce_weight", "l1_weight", "confidence_weight", "coupled_weight",
    "muon_lr", "adam_lr", "markov_lr_scale",
}  # fmt: skip
_LEAST = {"max_answer": 2, "max_sequence": 4}  # an anchor is an answer token with a successor
_NAMES = {"int": "an integer", "float": "a finite number", "bool": "true or false"}
_KINDS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,)}


def _check(owner: type, values: Mapping[str, Any]) -> None:
    """Numbers must be finite and of the field's kind, integers at least 1 and floats above 0 unless listed above."""
    kinds = {f.name: str(f.type) for f in fields(owner)}
    for name, value in values.items():
        kind, _, optional = kinds[name].partition(" | ")
        if kind.startswith("tuple") and not isinstance(value, tuple | list) and not (value is None and optional):
            raise ConfigError(f"{name}: must be values with commas between, got {value!r}")
        if kind not in _KINDS or (value is None and optional):
            continue
        is_number = isinstance(value, _KINDS[kind]) and isinstance(value, bool) == (kind == "bool")
        if not is_number or not math.isfinite(value):
            raise ConfigError(f"{name}: must be {_NAMES[kind]}, got {value!r}")
        if kind == "int":
            least = _LEAST.get(name, 0 if name in _FROM_ZERO else 1)
            if value < least:
                raise ConfigError(f"{name}: must be at least {least}, got {value}")
        elif kind == "float" and (value < 0 or (value == 0 and name not in _FROM_ZERO)):
            raise ConfigError(f"{name}: must be {'at least' if name in _FROM_ZERO else 'above'} 0, got {value}")
    for pair in values.get("temperatures", ()):
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        if not is_pair or not all(isinstance(x, int | float) and 0 <= x < math.inf for x in pair):
            raise ConfigError(f"temperatures: must be pairs share:temperature, as 0.6:1.0,0.4:0; got {pair!r}")
    if "temperatures" in values and not sum(share for share, _ in values["temperatures"]) > 0:
        raise ConfigError("temperatures: one share at least must be above 0")
    if values.get("heldout_share", 0.5) >= 1:
        raise ConfigError(f"heldout_share: must be below 1, got {values['heldout_share']}")
