"""torch's store in this process, for tests of what ranks agree on over it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta


class Held:
    """torch's store, as far as it is used: one for all ranks."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}
        self.changed = threading.Condition()
        self.gone = False

    def set(self, key: str, value: str) -> None:
        with self.changed:
            self.kept[key] = value
            self.changed.notify_all()

    def check(self, keys: list[str]) -> bool:
        with self.changed:
            if self.gone:
                raise RuntimeError("gone")
            return all(key in self.kept for key in keys)

    def get(self, key: str) -> bytes:
        with self.changed:
            return self.kept[key].encode()

    def add(self, key: str, amount: int) -> int:
        with self.changed:
            self.kept[key] = str(int(self.kept.get(key, "0")) + amount)
            return int(self.kept[key])

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        with self.changed:
            found = self.changed.wait_for(
                lambda: self.gone or all(key in self.kept for key in keys), timeout.total_seconds()
            )
            if self.gone or not found:
                raise RuntimeError("gone" if self.gone else "timeout")

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self.changed:
            if self.gone:
                raise RuntimeError("gone")
            if self.kept.get(key, "") == expected:
                self.kept[key] = desired
                self.changed.notify_all()
            return self.kept[key].encode()

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def end(self) -> None:
        with self.changed:
            self.gone = True
            self.changed.notify_all()
