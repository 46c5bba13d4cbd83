"""What a person's commands ask of the Commander, over HTTP."""

from __future__ import annotations

import argparse
import json
import urllib.request
from typing import Any
from urllib.parse import quote

from dalsegno.protos.commander_api import run_path
from dalsegno.protos.contract import Variable
from dalsegno.protos.options import UsageError, file_path
from dalsegno.protos.run_file import commander_url, read_run_file
from dalsegno.protos.text import one_line
from dalsegno.protos.yaml_text import InputRefused

from .milestones.access import Access, add_tls
from .milestones.commander_client import FAILURES, Away, Denied, exchange, failure

__all__ = ("AskedRun", "add_arguments")

# Seconds for an answer; one that waits for events may take as long again.
ANSWER_SECONDS = 30.0
LONGEST_ANSWER_BYTES = 16 << 20
# Status of a Commander that has too much to do just now.
_BUSY = 429


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds which run it is about, and what shows who asks."""
    parser.add_argument("file", type=file_path, metavar="run.yaml", help="the run")
    parser.add_argument("--commander", metavar="URL", help="another address than the file's, for instance of a tunnel")
    add_tls(parser)
    parser.add_argument("--json", action="store_true", help="for programs: JSON, one object in a line")


class AskedRun:
    """One run of a Commander.

    Args:
        options: As `add_arguments` has them.
        admin: Shows the admin's token instead of the job's.

    Raises:
        UsageError: One line for a person.
    """

    def __init__(self, options: argparse.Namespace, *, admin: bool = False) -> None:
        try:
            run = read_run_file(options.file)
        except InputRefused as error:
            raise UsageError("; ".join(error.lines)) from error
        try:
            self.url = commander_url(options.commander) if options.commander else run.commander
        except ValueError as error:
            raise UsageError(f"--commander: {error}") from error
        self.run_id = run.run_id
        self._headers = {"content-type": "application/json"}
        name = Variable.ADMIN_TOKEN if admin else Variable.TOKEN
        access = Access.given(options, self.url, name)
        if admin and not access.token:
            raise UsageError(f"{name} is not set: only the admin's token may do that")
        if access.token:
            self._headers["authorization"] = f"Bearer {access.token}"
        self._opener = access.opener()

    def get(self, path: str = "", **query: object) -> dict[str, Any]:
        """What is there, below the run. Raises Away; Denied, if asking again does not help."""
        wanted = "&".join(f"{name}={quote(str(value))}" for name, value in query.items())
        return self._ask(f"{path}?{wanted}" if wanted else path, None)

    def post(self, path: str) -> dict[str, Any]:
        """Gives an order. Raises Away."""
        return self._ask(path, b"")

    def _ask(self, path: str, body: bytes | None) -> dict[str, Any]:
        url = f"{self.url}{run_path(self.run_id)}{path}"
        request = urllib.request.Request(url, body, self._headers)
        try:
            code, text = exchange(request, ANSWER_SECONDS, LONGEST_ANSWER_BYTES, self._opener)
            if not 200 <= code < 300:
                raise _refusal(code, text)
            answer = json.loads(text)
        except FAILURES as error:
            raise failure(error, self.url) from error
        if not isinstance(answer, dict):
            raise Away(f"{self.url} answers something else than a Commander would")
        return answer


def _refusal(code: int, text: bytes) -> Away:
    """With the Commander's own line, if it has one; else a proxy or a tunnel answers, and it may only be starting."""
    try:
        detail = json.loads(text)["detail"]
    except (ValueError, KeyError, TypeError):
        detail = ""
    line = one_line(detail, 500) if isinstance(detail, str) and detail else f"it answers HTTP {code}"
    return Denied(line, code) if detail and 400 <= code < 500 and code != _BUSY else Away(line)
