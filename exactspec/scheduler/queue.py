"""A list of requests in the order of service: priority falling, then arrival."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from exactspec.types import RunningRequest


def service_order(request: RunningRequest) -> tuple[int, int]:
    """Sort key; unique, as arrivals are."""
    return (-request.request.priority, request.arrival)


class ServiceQueue:
    """Always sorted by `service_order`."""

    def __init__(self) -> None:
        self._items: list[RunningRequest] = []
        self.members: set[RunningRequest] = set()  # the same requests, for those who ask often; read only

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[RunningRequest]:
        return iter(self._items)

    def __contains__(self, request: RunningRequest) -> bool:
        return request in self.members

    @property
    def first(self) -> RunningRequest:
        return self._items[0]

    @property
    def last(self) -> RunningRequest:
        return self._items[-1]

    def add(self, request: RunningRequest) -> None:
        insort(self._items, request, key=service_order)
        self.members.add(request)

    def remove(self, request: RunningRequest) -> None:
        """Raises KeyError if it is not here."""
        if request not in self:
            raise KeyError(request.request.request_id)
        del self._items[bisect_left(self._items, service_order(request), key=service_order)]
        self.members.remove(request)
