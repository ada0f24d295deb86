"""Files that are whole or absent: written beside their place, flushed to the disk, then renamed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from exactspec.errors import ConfigError


def write_json(path: Path, content: Any) -> None:
    """JSON, atomically."""
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        raise _cannot_write(path, part, error) from error


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Safetensors, atomically. A full disk leaves what was there before and raises ConfigError."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    part = path.with_name(path.name + ".part")
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, part)
        sync(part)
        os.replace(part, path)
    except (OSError, SafetensorError) as error:
        raise _cannot_write(path, part, error) from error


def publish_folder(part: Path, folder: Path) -> None:
    """Renames a finished folder into place, replacing an older one of that name."""
    for file in part.iterdir():
        sync(file)
    sync(part)
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(part, folder)
    sync(folder.parent)


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _cannot_write(path: Path, part: Path, error: Exception) -> ConfigError:
    part.unlink(missing_ok=True)
    return ConfigError(f"{path}: cannot be written ({error}); is the disk full? What was saved before is untouched")
