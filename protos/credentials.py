"""What agent and master both check of a token and of certificates, before anything is served or called.

Standard library only.
"""

from __future__ import annotations

import ssl
from pathlib import Path

__all__ = ("SHORTEST_TOKEN", "PemError", "check_pem", "is_token")

# Characters.
SHORTEST_TOKEN = 16


class PemError(ValueError):
    """One line that names the flags and says what is wrong with their files."""


def is_token(text: str) -> bool:
    """Whether an HTTP header can carry it: one that none can would make each call fail without a reason."""
    return bool(text) and text.isascii() and text.isprintable() and " " not in text


def check_pem(authority: Path | None, certificate: Path | None, key: Path | None) -> None:
    """Has OpenSSL read the files, because it says what is wrong; gRPC would only fail to connect, or to listen.

    Args:
        authority: Certificates that the other side's must be signed by.
        certificate, key: What this side shows; both or neither.

    Raises:
        PemError: They do not hold what they should.
        OSError: They cannot be read.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if authority is not None:
            context.load_verify_locations(authority)
    except ssl.SSLError as error:
        raise PemError(f"--tls-ca {authority} holds no PEM certificate ({error.reason or 'not PEM'})") from error
    try:
        if certificate is not None:
            # The password is only needed for an encrypted key: fail instead of asking at the terminal.
            context.load_cert_chain(certificate, key, password=lambda: "")
    except ssl.SSLError as error:
        raise PemError(
            f"--tls-cert {certificate} and --tls-key {key} are no PEM certificate chain with its unencrypted key"
            f" ({error.reason or 'not PEM'})"
        ) from error
