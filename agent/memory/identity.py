"""Who an agent is to other agents where they speak TLS: a key and a certificate, made anew by each process.

Certificates of an operator would not do: most agents have none, and what they have seldom names the address under which
another agent calls. So each signs its own. The certificate's digest is part of the address that the agent registers,
over the master's TLS, and that the master hands out (`PeerAddress`). A caller asks for the certificate, goes on only if
it has that digest, and then trusts this one alone.
"""

from __future__ import annotations

import hashlib
import secrets
import socket
import ssl
from dataclasses import dataclass, field
from datetime import datetime

from dalsegno.protos.addresses import host_and_port
from dalsegno.protos.peer_address import PeerAddress

__all__ = ["NAME", "MemoryIdentity", "StrangerError", "certificate_at"]

# The name in each certificate, by which callers check it: they know it by its digest, and not by its address.
NAME = "dalsegno-peer"
# For connecting, and for the handshake; seconds.
_PATIENCE_SECONDS = 5.0


class StrangerError(Exception):
    """What answers at an address cannot be called by this agent; one line that says why. Waiting does not help."""


@dataclass(frozen=True)
class MemoryIdentity:
    """The identity of this process, in memory only.

    Attributes:
        key, certificate: PEM.
        secret: See `PeerAddress`.
    """

    key: bytes
    certificate: bytes
    secret: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)

    @property
    def digest(self) -> str:
        """SHA-256 of the certificate, as callers compare it."""
        return _digest_of(ssl.PEM_cert_to_DER_cert(self.certificate.decode()))

    @classmethod
    def make(cls) -> MemoryIdentity:
        """A new one, with an elliptic key (P-256).

        Raises:
            ImportError: The library `cryptography` is not here.
        """
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, NAME)])
        made = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            # It is valid as long as it is registered. With dates, clocks that differ would cut agents off.
            .not_valid_before(datetime(2000, 1, 1))
            .not_valid_after(datetime(9999, 12, 31, 23, 59, 59))
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
            .sign(key, hashes.SHA256())
        )
        pem = serialization.Encoding.PEM
        plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        return cls(key.private_bytes(pem, *plain), made.public_bytes(pem))


def certificate_at(address: PeerAddress) -> bytes:
    """The certificate (PEM) that is shown there, if it is the one with the address's digest.

    Nothing is sent but a handshake, which proves nothing by itself: whoever has seen the certificate can show it. What
    trusts this certificate alone then makes the other side prove that it has the key.

    Raises:
        StrangerError: Another one is shown, or none.
        OSError: Nobody answers. Blocks for 10 s at most.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # The digest says more than a name and a signature could.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection(host_and_port(address.target), _PATIENCE_SECONDS) as plain,
            context.wrap_socket(plain) as secured,
        ):
            shown = secured.getpeercert(binary_form=True) or b""
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
        raise OSError(f"it hung up: {error.reason or error}") from error
    except ssl.SSLError as error:
        raise StrangerError(f"what answers there does not speak TLS ({error.reason or error})") from error
    if _digest_of(shown) != address.certificate:
        raise StrangerError("what answers there shows another certificate than the one that the agent has registered")
    return ssl.DER_cert_to_PEM_cert(shown).encode()


def _digest_of(certificate: bytes) -> str:
    return hashlib.sha256(certificate).hexdigest()
