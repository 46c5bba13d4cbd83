"""Who may speak to the master: token, TLS, and the address it listens on."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import grpc
import grpc.aio

from dalsegno.protos.contract import Variable
from dalsegno.protos.credentials import SHORTEST_TOKEN, PemError, check_pem, is_token

__all__ = ("AuthError", "TlsFiles", "TokenInterceptor", "check_exposure", "is_loopback", "read_token")

Handler = Optional["grpc.RpcMethodHandler[Any, Any]"]
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]


class AuthError(Exception):
    """One line for a person: what is missing or wrong about token, TLS or address."""


def read_token(path: Path | None, variable: str = "", name: str = Variable.TOKEN) -> str | None:
    """The token in a file, or else in the value of the environment variable `name`, without white space around it.

    Raises AuthError if the file cannot be read, or the token is short or does not fit into an HTTP header.
    """
    if path is None and not variable:
        return None
    token, where = variable.strip(), name
    if path is not None:
        where = str(path)
        try:
            token = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise AuthError(f"cannot read the token file {path}: {reason}") from error
    if len(token) < SHORTEST_TOKEN:
        raise AuthError(f"the token in {where} is shorter than {SHORTEST_TOKEN} characters: use `openssl rand -hex 32`")
    if not is_token(token):
        raise AuthError(f"the token in {where} must be one word of printable ASCII: use `openssl rand -hex 32`")
    return token


def is_loopback(host: str) -> bool:
    """True if `host` is `localhost` or a loopback address; any other name may be anything."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_exposure(host: str, token: str | None, insecure: bool) -> None:
    """Refuses (AuthError) to listen beyond this machine to everybody who can reach the port."""
    if token is None and not insecure and not is_loopback(host):
        raise AuthError(
            f"--host {host} is reachable from other machines: give --token-file"
            " (and TLS: --tls-cert, --tls-key), or --insecure on a network that you trust"
        )


@dataclass(frozen=True)
class TlsFiles:
    """PEM files. With `client_ca` only clients that show a certificate signed by it are let in (mTLS)."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """The server's credentials. Raises AuthError if a file cannot be read or does not hold what it should."""
        key, certificate = _read(self.key), _read(self.certificate)
        client_ca = None if self.client_ca is None else _read(self.client_ca)
        try:
            check_pem(self.client_ca, self.certificate, self.key)
        except PemError as error:
            raise AuthError(str(error)) from error
        return grpc.ssl_server_credentials(
            [(key, certificate)], root_certificates=client_ca, require_client_auth=client_ca is not None
        )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise AuthError(f"cannot read {path}: {error.strerror or error}") from error


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Lets a call through only with `authorization: Bearer <token>` in its metadata."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None or self._allows(handler_call_details):
            return handler
        # Handled as a stream of which nothing is read: otherwise 150 calls of 15 MB without a token would take 2 GB.
        return grpc.stream_stream_rpc_method_handler(_refuse)

    def _allows(self, details: grpc.HandlerCallDetails) -> bool:
        for key, value in details.invocation_metadata or ():
            if key == "authorization":
                given = value if isinstance(value, bytes) else value.encode()
                # Compared in constant time, so that timing does not tell where a mismatch is.
                return hmac.compare_digest(given, self._expected)
        return False


_REFUSAL = "missing or wrong token: give the agent the job's token (--token-file)"


async def _refuse(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, _REFUSAL)
