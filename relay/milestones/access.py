"""How the Commander is spoken to: the token that it is shown, and the certificates of both sides."""

from __future__ import annotations

import argparse
import os
import ssl
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from dalsegno.protos.contract import Variable
from dalsegno.protos.credentials import PemError, check_pem, is_token
from dalsegno.protos.options import UsageError, file_path

__all__ = ("Access", "add_tls", "secret")

_FLAGS = ("tls_ca", "tls_cert", "tls_key")


def secret(name: str) -> str:
    """A token of the environment, without white space around it; "": there is none.

    Raises:
        UsageError: no HTTP header could carry it. The line does not repeat it.
    """
    token = os.environ.get(name, "").strip()
    if token and not is_token(token):
        raise UsageError(f"the token in {name} must be one word of printable ASCII")
    return token


def add_tls(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of certificates; the agent's variables are their defaults, so that an image needs no flags."""
    for flag, text in (
        ("--tls-ca", "the authority of the Commander's certificate (PEM); default: those of the system"),
        ("--tls-cert", "a certificate of one's own, where the Commander lets in only such (PEM)"),
        ("--tls-key", "its key (PEM)"),
    ):
        variable = f"{Variable.FLAG}{flag[2:].upper().replace('-', '_')}"
        given = os.environ.get(variable) or None
        parser.add_argument(flag, type=file_path, metavar="FILE", default=given, help=f"{text}; also {variable}")


@dataclass(frozen=True)
class Access:
    """How the Commander is spoken to.

    Attributes:
        token: the job's, or the admin's; "": none.
        tls_ca, tls_cert, tls_key: PEM files; None: not given.
    """

    token: str
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None

    @classmethod
    def given(cls, options: argparse.Namespace, url: str, variable: str = Variable.TOKEN) -> Access:
        """From the flags and the environment, for a Commander at this URL.

        Raises:
            UsageError: one line: a token that cannot be sent, a file that does not hold what it should.
        """
        files = {name: getattr(options, name) for name in _FLAGS}
        access = cls(secret(variable), **files)
        if any(files.values()) and not url.startswith("https:"):
            raise UsageError(f"{url} has no TLS, so certificates (--tls-ca) have no use: write https://, or drop them")
        if (access.tls_cert is None) != (access.tls_key is None):
            raise UsageError("--tls-cert and --tls-key belong together")
        try:
            for path in files.values():
                if path is not None:
                    path.read_bytes()
            check_pem(*files.values())
        except OSError as error:
            raise UsageError(f"{error.filename} cannot be read: {error.strerror or error}") from error
        except PemError as error:
            raise UsageError(str(error)) from error
        return access

    def opener(self) -> urllib.request.OpenerDirector:
        """For HTTP, with the proxies that the environment names now. (`urlopen` keeps those of its first use.)

        Raises:
            OSError: a file is gone, or another one, since it was checked.
        """
        if self.tls_ca is None and self.tls_cert is None:
            return urllib.request.build_opener()
        context = ssl.create_default_context(cafile=self.tls_ca)
        if self.tls_cert is not None:
            context.load_cert_chain(self.tls_cert, self.tls_key)
        return urllib.request.build_opener(urllib.request.HTTPSHandler(context=context))

    def flags(self) -> list[str]:
        """For the mirror."""
        named = {name: getattr(self, name) for name in _FLAGS}
        return [f"--{name.replace('_', '-')}={path}" for name, path in named.items() if path is not None]

    def agent_flags(self, url: str) -> list[str]:
        """For the agent, whose own port of the Commander has the same certificate.

        Raises:
            UsageError: nobody says which authority's certificates count.
        """
        if not url.startswith("https:") or self.tls_ca is not None:
            return self.flags()
        paths = ssl.get_default_verify_paths()
        authority = paths.cafile
        if authority is None:
            raise UsageError(f"{url}: this system has no file of authorities: name the Commander's with --tls-ca")
        return [f"--tls-ca={authority}", *self.flags()]
