"""The socket from the engine process to the HTTP process: every message once, whole and in order."""

from __future__ import annotations

import random
import socket

from exactspec.server.pipe import PipeReader, PipeWriter


def test_messages_survive_any_cut() -> None:
    """The same bytes in pieces of all sizes, from single bytes to everything at once."""
    ours, theirs = socket.socketpair()
    writer, sent = PipeWriter(ours), [b"", b"a", b"bc" * 300, b"", b"\x00\x01\x02\x03", b"d" * 5000]
    for message in sent:
        writer.send(message)
    writer.close(1.0)
    data = b"".join(iter(lambda: theirs.recv(1 << 16), b""))
    theirs.close()
    rng = random.Random(1)
    for most in (1, 2, 3, 7, 100, 4000, len(data)):
        got: list[bytes] = []
        reader, at = PipeReader(lambda view, got=got: got.append(bytes(view))), 0
        while at < len(data):
            size = rng.randint(1, most)
            reader.data_received(data[at : at + size])
            at += size
        assert got == sent


def test_a_reader_that_does_not_read_never_holds_the_writer_up() -> None:
    ours, theirs = socket.socketpair()
    writer, got = PipeWriter(ours), []
    reader = PipeReader(lambda view: got.append(bytes(view)))
    sent = [bytes([i]) * 100_000 for i in range(30)]  # far more than a socket holds
    for message in sent:
        writer.send(message)
    assert writer.behind
    theirs.setblocking(False)
    while len(got) < len(sent):
        try:
            reader.data_received(theirs.recv(1 << 16))
        except BlockingIOError:
            writer.flush()
    assert got == sent
    assert not writer.behind
    theirs.close()
    writer.send(b"nobody is there")  # no error: the process ends by itself
    writer.close(0.1)
