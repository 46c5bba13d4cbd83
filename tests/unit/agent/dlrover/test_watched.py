"""A lock says whether its holder died."""

from __future__ import annotations

import socket

from dalsegno.agent.dlrover.watched import watch


class Lock:
    """As the library's: it serves one connection, and releases what its holder left locked."""

    def __init__(self) -> None:
        self.locked = False

    def _deal_shared_lock_msg(self, connection: socket.socket) -> None:
        while word := connection.recv(1):
            if word == b"a":
                self.locked = True
            else:
                self.release()
                self.locked = False
            connection.send(word)
        if self.locked:
            self.release()

    def release(self) -> None:
        self.locked = False


def serve(words: bytes) -> tuple[bool, bool]:
    """What became of a lock whose user sends these words and then ends: (its holder died, it is locked)."""
    lock, died = Lock(), list[bool]()
    watch(lock, lambda: died.append(True))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.send(words)
        theirs.shutdown(socket.SHUT_WR)
        lock._deal_shared_lock_msg(ours)
    return bool(died), lock.locked


def test_a_holder_that_ends_is_seen() -> None:
    """It acquired, and its connection ended."""
    assert serve(b"a") == (True, False)


def test_who_has_held_nothing_may_end() -> None:
    """No harm is done."""
    assert serve(b"") == (False, False)


def test_an_orderly_release_is_none() -> None:
    """The holder is there, and waits for the answer."""
    lock, died = Lock(), list[bool]()
    watch(lock, lambda: died.append(True))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.send(b"a")
        assert ours.recv(1) == b"a"
        ours.setblocking(False)
        lock.locked = True

        class Once:
            """One word, then the end; the other side stays open meanwhile."""

            def __init__(self) -> None:
                self.words = [b"r", b""]

            def recv(self, size: int, flags: int = 0) -> bytes:
                return ours.recv(size, flags) if flags else self.words.pop(0)

            def send(self, word: bytes) -> None:
                """Nobody listens."""

        lock._deal_shared_lock_msg(Once())  # type: ignore[arg-type]
    assert (died, lock.locked) == ([], False)
