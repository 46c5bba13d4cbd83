"""Who may ask, and how much at a time: token, origin and size, before anything of a request is looked at."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse

from dalsegno.protos.contract import Variable

__all__ = ("LARGEST_BODY_BYTES", "Bounded", "Guard")

LARGEST_BODY_BYTES = 64 << 10

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Guard:
    """Checks requests, in the loop: FastAPI asks what is no coroutine in threads, and forty of them hold everybody up.

    Args:
        token: What each request must show, except those for health and the page; None: nothing.
        admin: What lets a request overrule others; it does for all else, too. None: nobody may.
    """

    def __init__(self, token: str | None, admin: str | None = None) -> None:
        self._token = None if token is None else f"Bearer {token}".encode()
        self._admin = None if admin is None else f"Bearer {admin}".encode()

    async def reads(self, request: Request) -> None:
        """Lets a request see the job. Raises HTTPException (401) for a missing or wrong token."""
        if self._token is not None and not _shows(request, self._token) and not self._is_admins(request):
            raise HTTPException(401, "missing or wrong token: send `authorization: Bearer <token>`")

    async def rules(self, request: Request) -> None:
        """Lets a request overrule others. Raises HTTPException (401, 403)."""
        await self.orders(request)
        if not self._is_admins(request):
            known = "send it as `authorization: Bearer <token>`" if self._admin else "there is none here"
            raise HTTPException(403, f"only the admin's token ({Variable.ADMIN_TOKEN}) may do that: {known}")

    def _is_admins(self, request: Request) -> bool:
        return self._admin is not None and _shows(request, self._admin)

    async def orders(self, request: Request) -> None:
        """Lets a request change something. Raises HTTPException: 401, or 403 for a page from elsewhere.

        A browser says whose page sends an order. Only the edge's own may.
        """
        await self.reads(request)
        origin = request.headers.get("origin")
        host = request.headers.get("host", "").lower()
        if origin is not None and origin.lower().partition("://")[2] != host:
            raise HTTPException(403, f"a page of {origin[:200]!r} may give no orders here")


class Bounded:
    """Refuses bodies that are larger than any order is, without reading them (413)."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if not length.isdigit() or int(length) > LARGEST_BODY_BYTES:
            await _refusal(f"a body of at most {LARGEST_BODY_BYTES} bytes is read")(scope, receive, send)
            return
        if dict(scope["headers"]).get(b"transfer-encoding") is not None:
            await _refusal("the body's content-length is missing")(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _shows(request: Request, token: bytes) -> bool:
    return hmac.compare_digest(request.headers.get("authorization", "").encode(), token)


def _refusal(why: str) -> JSONResponse:
    return JSONResponse({"detail": why}, 413, {"connection": "close"})
