"""From the engine process to the HTTP process: messages over one Unix socket, each after its length.

Outputs come every step, and each ZeroMQ message wakes a thread of its own on both sides: on a CPU these take time from
the engine's threads, so the busy direction is a plain socket that the HTTP process's loop reads itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable

_LENGTH = struct.Struct("<I")


class PipeWriter:
    """Never waits: what the socket does not take at once is kept for `flush`."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._unsent = bytearray()

    @property
    def behind(self) -> bool:
        """Whether something is left to `flush`."""
        return bool(self._unsent)

    def send(self, data: bytes) -> None:
        message = _LENGTH.pack(len(data)) + data
        if self._unsent:
            self._unsent += message
            self.flush()
            return
        sent = self._write(message)
        if sent < len(message):
            self._unsent += message[sent:]

    def flush(self) -> None:
        """Sends what is left, as far as the socket takes it."""
        if self._unsent:
            del self._unsent[: self._write(self._unsent)]

    def close(self, timeout_s: float) -> None:
        """Waits at most that long for the reader to take what is left."""
        self._connection.settimeout(timeout_s)
        with contextlib.suppress(OSError):
            self._connection.sendall(self._unsent)
        self._connection.close()

    def _write(self, data: bytes | bytearray) -> int:
        try:
            return self._connection.send(data)
        except BlockingIOError:
            return 0
        except OSError:  # nobody reads any more: the engine process ends by itself when its parent is gone
            return len(data)


class PipeReader(asyncio.Protocol):
    """Calls `on_message` with every message, in order."""

    def __init__(self, on_message: Callable[[memoryview], None]) -> None:
        self._on_message = on_message
        self._rest = bytearray()  # the beginning of a message

    def data_received(self, data: bytes) -> None:
        if self._rest:
            self._rest += data
            if len(self._rest) < 4 or len(self._rest) < 4 + _LENGTH.unpack_from(self._rest)[0]:
                return
            data, self._rest = bytes(self._rest), bytearray()
        view, at = memoryview(data), 0
        while at + 4 <= len(data):
            end = at + 4 + _LENGTH.unpack_from(data, at)[0]
            if end > len(data):
                break
            self._on_message(view[at + 4 : end])
            at = end
        self._rest += view[at:]
