"""Short draft vocabularies: a draft needs logits only of tokens that the target often says.

A draft round reads the LM head once and the Markov table once per position; both shrink with the vocabulary. Tokens
outside are never proposed, the target still draws them: speed and acceptance change, no output does.
Stored beside the weights as draft_vocab.json: {"token_ids": [rising ids]}.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from exactspec.draft.files import write_text
from exactspec.errors import CheckpointError

VOCAB_FILE = "draft_vocab.json"
_ROWS = 64  # unit vectors per call when weight rows are read back


def frequent_tokens(counts: Tensor, size: int) -> list[int]:
    """The `size` most counted token ids, rising; of equally counted ones the lowest. counts: int64 [V]."""
    ranked = counts.argsort(descending=True, stable=True)
    return ranked[:size].sort().values.tolist()


def write_draft_vocab(folder: str | Path, token_ids: list[int], facts: Mapping[str, object] | None = None) -> None:
    """Stores a short vocabulary beside a checkpoint, atomically. facts: how it was made; nothing reads them."""
    content = {"token_ids": token_ids, **(facts or {})}
    write_text(Path(folder) / VOCAB_FILE, json.dumps(content, separators=(",", ":")) + "\n")


def read_draft_vocab(folder: str | Path, vocab_size: int) -> list[int] | None:
    """Token ids of the short vocabulary, or None without the file. CheckpointError for any other content."""
    path = Path(folder) / VOCAB_FILE
    if not path.exists():
        return None
    try:
        ids = json.loads(path.read_text(encoding="utf-8"))["token_ids"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: expected an object with 'token_ids' ({error})") from error
    if not isinstance(ids, list) or not ids:
        raise CheckpointError(f"{path}: token_ids: expected a non-empty list")
    previous = -1
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not previous < token < vocab_size:
            raise CheckpointError(f"{path}: token_ids: must be rising ids from 0 to {vocab_size - 1}, got {token!r}")
        previous = token
    return ids


def head_rows(lm_head: Callable[[Tensor], Tensor], hidden_size: int, token_ids: Tensor) -> Tensor:
    """Rows [n, H] float32 of a packed LM head: its outputs for the unit vectors, which are its weights exactly."""
    unit = torch.eye(hidden_size, device=token_ids.device)
    columns = [lm_head(part)[:, token_ids] for part in unit.split(_ROWS)]
    return torch.cat(columns).T.contiguous()
