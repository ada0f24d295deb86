"""A progress bar for loads that take long, on a terminal only."""

from __future__ import annotations

import sys
import time
from typing import Any

_QUIET_SECONDS = 2.0


class LoadProgress:
    """Counts steps; shows a bar on stderr once two seconds have passed, if stderr is a terminal."""

    def __init__(self, label: str, total: int) -> None:
        self.label, self.total, self.done = label, total, 0
        self._started = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def advance(self, steps: int = 1) -> None:
        self.done += steps
        if self._bar is None and sys.stderr.isatty() and time.monotonic() - self._started > _QUIET_SECONDS:
            self._show()
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done)

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self._bar = Progress(console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task(self.label, total=self.total)
        self._bar.start()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __enter__(self) -> LoadProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
