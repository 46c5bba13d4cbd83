"""A hub that takes connections and never answers, as behind a firewall that drops packets; and what a cache has."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

MODEL = "somebody/tiny"
_CONFIG = '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8}'


class SilentHub:
    """Listens on loopback until it is closed.

    Attributes:
        url: For HF_ENDPOINT.
        asked: The first line of each request.
    """

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.asked: list[str] = []
        self._taken: list[socket.socket] = []
        threading.Thread(target=self._serve, name="silent-hub", daemon=True).start()

    def asked_for(self, word: str) -> int:
        """How many requests named it."""
        return sum(word in line for line in self.asked)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        for one in (self._socket, *self._taken):
            one.close()

    def _serve(self) -> None:
        while True:
            try:
                taken, _ = self._socket.accept()
            except OSError:
                return
            self._taken.append(taken)
            threading.Thread(target=self._read, args=(taken,), daemon=True).start()

    def _read(self, taken: socket.socket) -> None:
        try:
            self.asked.append(taken.recv(4096).split(b"\r\n")[0].decode())
        except OSError:
            return


def make_cache(home: Path) -> None:
    """What the library has in HF_HOME once it has fetched `MODEL`'s configuration."""
    repository = home / "hub" / f"models--{MODEL.replace('/', '--')}"
    for name, text in (("refs/main", "abc"), ("snapshots/abc/config.json", _CONFIG)):
        path = repository / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
