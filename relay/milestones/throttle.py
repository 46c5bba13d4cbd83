"""A proxy on loopback that lets only so many bytes per second out, whichever library sends them.

`huggingface_hub` uploads by two ways: Git LFS in Python and Xet in Rust. Neither can be told a rate; both heed the
proxy of the environment. TLS goes through it as it is, by CONNECT. Where the environment names a proxy already, this
one hands over to that.
"""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
import socket
import threading
import time
from urllib.parse import unquote, urlsplit

__all__ = ("Bucket", "ThrottlingProxy", "is_direct")

# An upload has the lowest priority: where the training has the cores, what it missed for so long it may catch up.
SAVED_SECONDS = 0.4
_HEAD_BYTES = 64 << 10
# What goes at once: so much that pieces cost little, and less where that would come in bursts.
_PIECE_BYTES, _PIECE_SECONDS = 256 << 10, 0.05
_LEAST_PIECE_BYTES = 4 << 10
_CONNECT_SECONDS = 20.0
_AGAIN_SECONDS = 0.2
# What the kernel may hold of what was sent: with more of it the rate at the other end would come in bursts.
_SENDING_BYTES = 256 << 10


class Bucket:
    """Says how long to wait before so many bytes may go. Threads share it.

    Args:
        rate: bytes per second.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._free_at = 0.0

    def delay(self, count: int, now: float) -> float:
        """Seconds to wait before ``count`` bytes go, which are booked. What was not used is saved up for a moment."""
        with self._lock:
            begin = max(self._free_at, now - SAVED_SECONDS)
            self._free_at = begin + count / self._rate
            return max(0.0, begin - now)


class ThrottlingProxy:
    """An HTTP proxy on loopback.

    Only who knows its password may use it.

    Args:
        rate: bytes per second, of all connections together.
        environment: where the proxies stand that were set before.
    """

    def __init__(self, rate: float, environment: dict[str, str]) -> None:
        self._bucket = Bucket(rate)
        self._piece_bytes = min(_PIECE_BYTES, max(_LEAST_PIECE_BYTES, int(rate * _PIECE_SECONDS)))
        self._upstream = {
            key: environment.get(f"{key}_proxy") or environment.get(f"{key.upper()}_PROXY")
            for key in ("http", "https", "all")
        }
        self._direct = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
        self._password = secrets.token_hex(16)
        self._server = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, name="throttle", daemon=True).start()

    @property
    def url(self) -> str:
        """For ``HTTPS_PROXY`` and its like."""
        return f"http://dalsegno:{self._password}@127.0.0.1:{self._server.getsockname()[1]}"

    def take_over(self) -> None:
        """Has this process, and those that it starts, go through the proxy from now on."""
        for key in ("http", "https", "all"):
            os.environ[f"{key}_proxy"] = os.environ[f"{key.upper()}_PROXY"] = self.url
        for key in ("no_proxy", "NO_PROXY"):
            os.environ.pop(key, None)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
                threading.Thread(target=self._serve, args=(near,), daemon=True).start()
            except (OSError, RuntimeError):
                # No descriptor or no thread is to be had just now. Without this one nothing would be uploaded any more.
                time.sleep(_AGAIN_SECONDS)  # why: nothing tells when there is one

    def _serve(self, near: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), near:
            head = self._head(near)
            if not self._is_ours(head):
                near.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
                return
            method, target = head.split(b" ", 2)[:2]
            is_tunnel = method == b"CONNECT"
            scheme = "https" if is_tunnel else "http"
            url = urlsplit(f"//{target.decode()}" if is_tunnel else target.decode())
            host, port = url.hostname or "", url.port or (443 if is_tunnel else 80)
            upstream = self._way(scheme, host)
            try:
                far = socket.create_connection(upstream or (host, port), _CONNECT_SECONDS)
            except OSError:
                near.sendall(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
                return
            with far:
                far.settimeout(None)
                far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SENDING_BYTES)
                if is_tunnel and upstream is None:
                    near.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                else:
                    self._pass(self._for_upstream(head, scheme) if upstream else _without_credentials(head), far)
                threading.Thread(target=_pump, args=(far, near), daemon=True).start()
                while piece := near.recv(self._piece_bytes):
                    self._pass(piece, far)
                with contextlib.suppress(OSError):
                    far.shutdown(socket.SHUT_WR)

    def _pass(self, data: bytes, far: socket.socket) -> None:
        wait = self._bucket.delay(len(data), time.monotonic())
        if wait > 0:
            time.sleep(wait)  # why: this is the limit
        far.sendall(data)

    @staticmethod
    def _head(near: socket.socket) -> bytes:
        """The first request's head, and what has come behind it."""
        near.settimeout(_CONNECT_SECONDS)
        head = b""
        while b"\r\n\r\n" not in head:
            piece = near.recv(_HEAD_BYTES)
            if not piece or len(head) > _HEAD_BYTES:
                raise ValueError("no request")
            head += piece
        near.settimeout(None)
        return head

    def _is_ours(self, head: bytes) -> bool:
        given = base64.b64encode(f"dalsegno:{self._password}".encode())
        return b"Basic " + given in head.partition(b"\r\n\r\n")[0]

    def _way(self, scheme: str, host: str) -> tuple[str, int] | None:
        """The proxy that was set before for this host; None: straight there."""
        proxy = self._upstream[scheme] or self._upstream["all"]
        if not proxy or is_direct(host, self._direct):
            return None
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        return parts.hostname or "", parts.port or 80

    def _for_upstream(self, head: bytes, scheme: str) -> bytes:
        head = _without_credentials(head)
        proxy = self._upstream[scheme] or self._upstream["all"] or ""
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        if not parts.username:
            return head
        word = base64.b64encode(f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode())
        first, _, rest = head.partition(b"\r\n")
        return first + b"\r\nProxy-Authorization: Basic " + word + b"\r\n" + rest


def is_direct(host: str, exceptions: str) -> bool:
    """Whether ``no_proxy`` names this host, or a domain that it is in."""
    names = [name.strip().lstrip(".").lower() for name in exceptions.split(",") if name.strip()]
    return any(name == "*" or host.lower() == name or host.lower().endswith(f".{name}") for name in names)


def _without_credentials(head: bytes) -> bytes:
    fields, _, rest = head.partition(b"\r\n\r\n")
    kept = [line for line in fields.split(b"\r\n") if not line.lower().startswith(b"proxy-authorization:")]
    return b"\r\n".join(kept) + b"\r\n\r\n" + rest


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(_PIECE_BYTES):
            target.sendall(piece)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)
