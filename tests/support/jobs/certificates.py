"""Certificates for tests, made by the `openssl` program and gone with the test's directory."""

from __future__ import annotations

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
