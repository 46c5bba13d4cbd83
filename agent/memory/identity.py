"""Who an agent is to other agents where they speak TLS: a key and a certificate, made anew by each process.

Certificates of an operator would not do: most agents have none, and what they have seldom names the address under which
another agent calls. So each signs its own. The certificate's digest is part of the address that the agent registers,
over the master's TLS, and that the master hands out (`PeerAddress`). A caller trusts what has that digest alone.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import ssl
from dataclasses import dataclass, field
from datetime import datetime

__all__ = ["MemoryIdentity", "caller_context", "digest_of"]

# The name in each certificate: there must be one, and nobody looks at it.
_NAME = "dalsegno-peer"


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
        return digest_of(ssl.PEM_cert_to_DER_cert(self.certificate.decode()))

    def context(self) -> ssl.SSLContext:
        """For who is called."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # Nobody comes back, and the caller looks whether it was answered while it sends: tickets would look like that.
        context.num_tickets = 0
        # Python loads keys from files alone. This one is in memory, without a name.
        descriptor = os.memfd_create("identity", os.MFD_CLOEXEC)
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(self.key + self.certificate)
            context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)
        return context

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
        name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, _NAME)])
        made = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            # It is valid as long as it is registered. With dates, clocks that differ would cut agents off.
            .not_valid_before(datetime(2000, 1, 1))
            .not_valid_after(datetime(9999, 12, 31, 23, 59, 59))
            .sign(key, hashes.SHA256())
        )
        pem = serialization.Encoding.PEM
        plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        return cls(key.private_bytes(pem, *plain), made.public_bytes(pem))


def caller_context() -> ssl.SSLContext:
    """For who calls an agent. What it shows is looked at by its digest, which says more than a name and a signature.

    In TLS 1.3 whoever shows a certificate proves in the same handshake that it has the key.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def digest_of(certificate: bytes) -> str:
    """SHA-256 of a certificate (DER), hex."""
    return hashlib.sha256(certificate).hexdigest()
