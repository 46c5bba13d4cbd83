"""Token and certificates as the user gives them, in files and environment: reads and checks them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dalsegno.protos.contract import Variable
from dalsegno.protos.credentials import PemError, check_pem, is_token

from .connection import Credentials

__all__ = ["CredentialFiles", "CredentialsError"]


class CredentialsError(ValueError):
    """One line that says what is wrong with a file, and what to change."""


@dataclass(frozen=True)
class CredentialFiles:
    """Where token and certificates are. `token` is used if there is no `token_file`."""

    token_file: Path | None = None
    token: str | None = None
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None

    @classmethod
    def given(cls, options: argparse.Namespace | Mapping[str, str | None], token: str | None) -> CredentialFiles:
        """From the options `token_file`, `tls_ca`, `tls_cert`, `tls_key`; `token` is the environment variable's."""
        values = options if isinstance(options, Mapping) else vars(options)
        named = {name: values.get(name) for name in ("token_file", "tls_ca", "tls_cert", "tls_key")}
        return cls(token=token or None, **{name: Path(path) for name, path in named.items() if path})

    @property
    def some(self) -> bool:
        """Whether anything was given at all."""
        return self != CredentialFiles()

    @property
    def tls(self) -> bool:
        """Whether the master is spoken to over TLS."""
        return Credentials(None, self.tls_ca, self.tls_cert, self.tls_key).tls

    def read(self) -> Credentials:
        """Reads the token, which may change while the agent lives. Each channel reads the certificates itself.

        Raises:
            CredentialsError: it cannot be read, or cannot be sent.
        """
        token, where = self.token, Variable.TOKEN
        if self.token_file is not None:
            where = f"the token file {self.token_file}"
            try:
                token = self.token_file.read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise CredentialsError(f"{where} cannot be read: {_reason(error)}") from error
        if token is not None and not is_token(token):
            raise CredentialsError(f"{where} must hold the job's token, one word of printable ASCII")
        return Credentials(token, self.tls_ca, self.tls_cert, self.tls_key)

    def check(self) -> None:
        """Reads everything once.

        Raises:
            CredentialsError: something cannot be used.
        """
        self.read()
        if (self.tls_cert is None) != (self.tls_key is None):
            raise CredentialsError("--tls-cert and --tls-key belong together")
        for flag, path in (("ca", self.tls_ca), ("cert", self.tls_cert), ("key", self.tls_key)):
            try:
                if path is not None:
                    path.read_bytes()
            except OSError as error:
                raise CredentialsError(f"--tls-{flag} {path} cannot be read: {_reason(error)}") from error
        try:
            check_pem(self.tls_ca, self.tls_cert, self.tls_key)
        except PemError as error:
            raise CredentialsError(str(error)) from error


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return str(getattr(error, "strerror", None) or error)
