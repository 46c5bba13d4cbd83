"""What a pod and its mirror ask of the Commander, and tell it, over HTTP; and how anybody of ours speaks to it."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

from dalsegno.protos.commander_api import MILESTONES, run_path
from dalsegno.protos.text import one_line

from .access import Access

__all__ = ("FAILURES", "Away", "CommanderClient", "Denied", "Milestone", "exchange", "failure")

_ANSWER_SECONDS = 10.0
_LONGEST_ANSWER_BYTES = 4 << 20
# What `exchange` raises where there is no answer.
FAILURES = (OSError, ValueError, http.client.HTTPException)


class Away(Exception):
    """The Commander does not answer, or not as it should; one line."""


class Denied(Away):
    """The Commander does not know the run, does not let us in, or is another one; one line.

    Attributes:
        status: of HTTP; 0: nothing was asked, because its certificate is not trusted.
    """

    def __init__(self, line: str, status: int) -> None:
        super().__init__(line)
        self.status = status


def exchange(
    request: urllib.request.Request, seconds: float, longest: int, opener: urllib.request.OpenerDirector
) -> tuple[int, bytes]:
    """The status code and the body of an answer, also of a refusal.

    Args:
        request: what is asked.
        seconds: for each wait.
        longest: bytes of the body that are read.
        opener: see `Access.opener`.

    Raises:
        FAILURES: there is none.
    """
    try:
        with opener.open(request, timeout=seconds) as reply:
            return reply.status, reply.read(longest)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(longest)


def failure(error: Exception, url: str) -> Away:
    """What one of FAILURES says, for a person.

    Args:
        error: it.
        url: of the Commander.
    """
    cause = getattr(error, "reason", None) or error
    text = one_line(str(cause) or type(cause).__name__, 200)
    if isinstance(cause, ssl.SSLCertVerificationError):
        said = one_line(cause.verify_message, 200)
        return Denied(f"the certificate of {url} is not trusted ({said}): name its authority with --tls-ca", 0)
    if isinstance(cause, ssl.SSLError) and cause.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
        text += ": it seems to have no TLS: is it http://?"
    elif url.startswith("http:") and isinstance(cause, (ConnectionResetError, http.client.BadStatusLine)):
        text += ": it may want TLS: is it https://?"
    elif isinstance(cause, json.JSONDecodeError):
        text = "what answers there is no Commander"
    if proxy := _proxy(url):
        text += f" (asked through the proxy {proxy}: name the host in no_proxy to reach it directly)"
    return Away(f"no answer from {url}: {text}")


def _proxy(url: str) -> str:
    """HOST:PORT of the proxy that the environment names for it, without a password; "": none."""
    parts = urlsplit(url)
    proxy = urllib.request.getproxies().get(parts.scheme, "")
    if not proxy or urllib.request.proxy_bypass(parts.hostname or ""):
        return ""
    return one_line(proxy.rpartition("@")[2].rpartition("://")[2].rstrip("/"), 200)


@dataclass(frozen=True)
class Milestone:
    """One of a run: which revision of which repository holds which checkpoint."""

    repo: str
    revision: str
    step: int
    checkpoint: str
    digest: str


class CommanderClient:
    """The Commander of one run.

    Args:
        url: its HTTP edge.
        run_id: the run.
        access: what it is shown, and must show.

    Raises:
        OSError: certificates cannot be read.
    """

    def __init__(self, url: str, run_id: str, access: Access) -> None:
        self._opener = access.opener()
        self.url = url
        self._base = url + run_path(run_id)
        self._headers = {"Authorization": f"Bearer {access.token}"} if access.token else {}

    def run(self) -> dict[str, Any]:
        """What it knows of the run: ``head``, ``milestones`` and so on.

        Raises:
            Away: it does not answer; `Denied`, if asking again does not help.
        """
        status, answer = self._ask(self._base, None)
        line = f"{self.url} answers {status}: {one_line(str(answer.get('detail', '')), 200)}"
        # What has no line of its own is a proxy's or a tunnel's answer, and the Commander may only be starting.
        if status in (401, 403, 404) and answer.get("detail"):
            raise Denied(line, status)
        if status != 200:
            raise Away(line)
        return answer

    def tell(self, milestone: Milestone) -> bool:
        """Makes a milestone the run's.

        Returns:
            Whether it counts; False: its checkpoint was never the run's, and it never will.

        Raises:
            Away: it does not answer; it may have heard.
        """
        status, answer = self._ask(self._base + MILESTONES, asdict(milestone))
        # A 409 without a line of its own is a proxy's, see `run`.
        if status != 200 and not (status == 409 and answer.get("detail")):
            raise Away(f"{self.url} answers {status}: {one_line(str(answer.get('detail', '')), 200)}")
        return status == 200

    def _ask(self, url: str, content: dict[str, Any] | None) -> tuple[int, dict[str, Any]]:
        data = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(url, data, {**self._headers, "Content-Type": "application/json"})
        try:
            status, text = exchange(request, _ANSWER_SECONDS, _LONGEST_ANSWER_BYTES, self._opener)
            answer = json.loads(text) if text.strip() else {}
        except FAILURES as error:
            raise failure(error, self.url) from error
        return status, answer if isinstance(answer, dict) else {}
