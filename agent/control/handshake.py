"""Finds out whether calls fail because agent and master do not agree on TLS or certificates.

In that case gRPC answers UNAVAILABLE, as it does while there is no master yet, and its texts change between versions.
So the agent makes one TLS handshake itself, and tells people what to change.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl

from dalsegno.protos.addresses import host_and_port

from .connection import Credentials

__all__ = ["mismatch"]

# Seconds for connecting, and for each answer.
_TIMEOUT_SECONDS = 3.0
# OpenSSL's numbers (x509_vfy.h): not yet valid, expired; another name, another address.
_DATES = frozenset({9, 10})
_NAMES = frozenset({62, 64})


def mismatch(address: str, credentials: Credentials) -> str:
    """One line for a person when `credentials` cannot work with the master at `address` (HOST:PORT).

    Empty if nothing is proven: nobody listens, it takes too long, or the handshake does not fail. Blocks for a few
    seconds at most.
    """
    try:
        place = host_and_port(address)
        with socket.create_connection(place, _TIMEOUT_SECONDS) as plain:
            if credentials.tls:
                return _with_tls(plain, place[0], f"the master at {address}", credentials)
            return _without_tls(plain, f"the master at {address}")
    except (OSError, ValueError):
        return ""


def _without_tls(plain: socket.socket, master: str) -> str:
    context = _context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        context.wrap_socket(plain).close()
    except ssl.SSLError as error:
        if not _is_alert(error):
            return ""
    return f"{master} speaks TLS: give --tls-ca with the certificate of the authority that signed the master's"


def _with_tls(plain: socket.socket, host: str, master: str, credentials: Credentials) -> str:
    context = _context()
    if credentials.tls_ca is not None:
        context.load_verify_locations(credentials.tls_ca)
    else:
        # gRPC has its own roots, which cannot be asked.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if credentials.tls_cert is not None:
        context.load_cert_chain(credentials.tls_cert, credentials.tls_key, password=lambda: "")
    try:
        secured = context.wrap_socket(plain, server_hostname=host)
    except ssl.SSLCertVerificationError as error:
        return _not_accepted(error, host, master, credentials)
    except ssl.SSLEOFError:
        return ""
    except ssl.SSLError as error:
        if _is_alert(error):
            return _wants_certificate(master, credentials)
        return f"{master} does not speak TLS: start it with --tls-cert and --tls-key, or drop --tls-ca here"
    with secured:
        try:
            # A satisfied server speaks first (HTTP/2's settings); in TLS 1.3 a refused certificate shows only here.
            content = secured.recv(1)
        except ssl.SSLError as error:
            content = b"" if _is_alert(error) else b"?"
        except ConnectionError:
            content = b""
    return "" if content else _wants_certificate(master, credentials)


def _not_accepted(error: ssl.SSLCertVerificationError, host: str, master: str, credentials: Credentials) -> str:
    why = error.verify_message.rstrip(".")
    if error.verify_code in _NAMES:
        return (
            f"{master} shows a certificate for another name ({why}): give --master a name that is in it, or make it"
            f" with subjectAltName={_alternative_name(host)}"
        )
    if error.verify_code in _DATES:
        return f"{master} shows a certificate that is not valid now ({why}): renew it, or check this machine's clock"
    return (
        f"{master} shows a certificate that --tls-ca {credentials.tls_ca} does not accept ({why}): give the certificate"
        " of the authority that signed it"
    )


def _alternative_name(host: str) -> str:
    try:
        return f"IP:{ipaddress.ip_address(host)}"
    except ValueError:
        return f"DNS:{host}"


def _wants_certificate(master: str, credentials: Credentials) -> str:
    if credentials.tls_cert is None:
        return f"{master} lets in only nodes with a certificate: give --tls-cert and --tls-key"
    return (
        f"{master} does not accept --tls-cert {credentials.tls_cert}: give one that is signed by the authority in the"
        " master's own --tls-ca"
    )


def _context() -> ssl.SSLContext:
    """A context like gRPC's: HTTP/2, and a certificate in the file is trusted itself."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def _is_alert(error: ssl.SSLError) -> bool:
    """Whether the other side speaks TLS, and used it to refuse."""
    return "ALERT" in (error.reason or "")
