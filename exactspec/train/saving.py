"""What training writes: JSON, tensors and folders, each whole or absent."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from exactspec.draft.files import sync, write_text, write_whole


def write_json(path: Path, content: Any) -> None:
    """JSON, atomically."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Safetensors, atomically. A full disk leaves what was there before and raises ConfigError."""
    from safetensors.torch import save_file

    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_whole(path, lambda part: save_file(kept, part))


def publish_folder(part: Path, folder: Path) -> None:
    """Renames a finished folder into place, replacing an older one of that name."""
    for file in part.iterdir():
        sync(file)
    sync(part)
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(part, folder)
    sync(folder.parent)
