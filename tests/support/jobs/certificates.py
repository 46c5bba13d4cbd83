"""Certificates for tests, made by the `openssl` program and gone with the test's directory."""

from __future__ import annotations

import secrets
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True)
class Certificate:
    """PEM files."""

    path: Path
    key: Path


class Authority:
    """Signs certificates; everything lies in `folder`, which is made."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("certificates are made with the program openssl, which is not here")
        self.folder = folder
        folder.mkdir(parents=True)
        self.path = folder / "ca.pem"
        subject = ("-subj", f"/CN={folder.name}", "-days", "2")
        self._openssl("req", "-x509", *_KEY, "-keyout", "ca.key", "-out", "ca.pem", *subject)

    def issue(self, name: str, alternative: str = "IP:127.0.0.1", days: int = 2) -> Certificate:
        """A certificate for these names (`subjectAltName`) for so many days; none: it has expired."""
        self._openssl("req", *_KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        (self.folder / "extensions").write_text(f"subjectAltName={alternative}\n", encoding="ascii")
        signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "extensions")
        signed = ("-in", f"{name}.csr", "-out", f"{name}.pem", "-days", str(days))
        self._openssl("x509", "-req", *signing, *signed)
        return Certificate(self.folder / f"{name}.pem", self.folder / f"{name}.key")

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=self.folder, timeout=30)


@dataclass(frozen=True)
class Keys:
    """What an operator has made: an authority, a certificate each for master and agents, a token."""

    authority: Authority
    master: Certificate
    agent: Certificate
    token: str
    token_file: Path

    def server(self, mutual: bool = False) -> dict[str, str]:
        """Flags of the master, without the two dashes."""
        named = {"token-file": self.token_file, "tls-cert": self.master.path, "tls-key": self.master.key}
        return {key: str(path) for key, path in named.items()} | ({"tls-ca": str(self.ca)} if mutual else {})

    def client(self, mutual: bool = False) -> dict[str, str]:
        """Flags of an agent, without the two dashes."""
        own = {"tls-cert": str(self.agent.path), "tls-key": str(self.agent.key)} if mutual else {}
        return {"token-file": str(self.token_file), "tls-ca": str(self.ca), **own}

    @property
    def ca(self) -> Path:
        return self.authority.path


def make_keys(folder: Path, alternative: str = "IP:127.0.0.1") -> Keys:
    """All of it, in this folder, which is made; the master's certificate is for these names."""
    authority = Authority(folder)
    token = secrets.token_hex(32)
    token_file = folder / "token"
    token_file.write_text(token + "\n", encoding="ascii")
    return Keys(authority, authority.issue("master", alternative), authority.issue("agent"), token, token_file)


def as_flags(values: dict[str, str]) -> tuple[str, ...]:
    """As a command line has them."""
    return tuple(f"--{name}={value}" for name, value in values.items())
