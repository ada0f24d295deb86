"""Files that are whole or absent: written beside their place, flushed to the disk, then renamed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from exactspec.errors import ConfigError


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """`write` fills the file it is given, which then takes the place of `path`.

    Raises ConfigError where that fails, a full disk for example; what was there before is untouched then.
    """
    from safetensors import SafetensorError

    part = path.with_name(path.name + ".part")
    try:
        write(part)
        sync(part)
        os.replace(part, path)
    except (OSError, SafetensorError) as error:
        part.unlink(missing_ok=True)
        raise ConfigError(
            f"{path}: cannot be written ({error}); is the disk full? What was saved before is untouched"
        ) from error


def write_text(path: Path, text: str) -> None:
    """Text in UTF-8, by `write_whole`."""
    write_whole(path, lambda part: part.write_text(text, encoding="utf-8"))


def sync(path: Path) -> None:
    """Waits until a file's or a folder's content is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
