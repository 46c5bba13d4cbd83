"""The process of one upload or download: the only one that imports ``huggingface_hub``.

It reads its job, one line of JSON, from its standard input, writes what comes of it, JSON lines, to its standard
output, and ends when its input does: so it never outlives who started it. ``child`` is the other side.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from functools import partial
from typing import Any

from dalsegno.protos.priority import yield_to_others
from dalsegno.protos.shortage import shortage
from dalsegno.protos.text import one_line

from .child import VOLUME_ERRNOS
from .libraries import INSTALL_RELAY
from .throttle import ThrottlingProxy

__all__ = ("main",)

# How often the library's own warnings would come: once for each try of each request.
_QUIET = {
    "HF_HUB_OFFLINE": "0",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_VERBOSITY": "error",
}


def main() -> None:
    """Does the job that its standard input names."""
    job: dict[str, Any] = json.loads(sys.stdin.readline())
    # What a library prints is none of our lines.
    tell = partial(_tell, os.dup(1))
    os.dup2(2, 1)
    threading.Thread(target=_end_with_the_input, name="life-line", daemon=True).start()
    if niceness := job.get("nice", 0):
        yield_to_others(niceness)
    os.environ.update(_QUIET)
    token = os.environ.get("HF_TOKEN", "").strip()
    if job.get("upload_limit"):
        ThrottlingProxy(float(job["upload_limit"]), dict(os.environ)).take_over()
    # Else httpx imports its command line, with all that shows it: a sixth of the time that an upload computes.
    sys.modules.setdefault("click", None)  # type: ignore[arg-type]  # this is how Python is told that there is none
    try:
        from . import hub_calls  # why here: it reads the environment when it is imported
    except ImportError as error:
        why = shortage(error)
        needs = f"{_clean(error, token)}: the hub needs the extra relay: {INSTALL_RELAY}"
        tell({"failed": why or needs, "lacking": not why})
        os._exit(0)

    try:
        if job["do"] == "publish":
            hub_calls.publish(job, token, tell)
        else:
            hub_calls.download(job, token, tell)
    except hub_calls.RefusedMilestone as refused:
        tell({"refused": _clean(refused, token)})
    except Exception as error:  # whatever the library raises is one line for a person
        tell({"failed": _clean(error, token), "xet": hub_calls.is_of_xet(error), "errno": _of_volume(error)})
    os._exit(0)  # threads of the library may still wait for a network


def _of_volume(error: BaseException) -> int:
    """The errno of what a volume says no with, and a network never; 0: it is something else."""
    return error.errno or 0 if isinstance(error, OSError) and error.errno in VOLUME_ERRNOS else 0


def _clean(error: BaseException, token: str) -> str:
    text = str(error).removeprefix(f"[Errno {_of_volume(error)}] ") or type(error).__name__
    cause = error.__cause__
    if cause is not None and str(cause) and str(cause) not in text:
        text = f"{text}: {cause}"
    return one_line(text.replace(token, "***") if token else text, 300)


def _tell(answers: int, event: dict[str, Any]) -> None:
    # One write: what is read is whole lines.
    os.write(answers, json.dumps(event).encode() + b"\n")


def _end_with_the_input() -> None:
    while os.read(0, 4096):
        pass
    os._exit(3)


if __name__ == "__main__":
    main()
