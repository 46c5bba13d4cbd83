"""Ranks of which one ends, the last argument, while they open their sessions; run by ``test_lost_peer``."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from dalsegno.elastic import session
from dalsegno.elastic.saving import resuming


def killed(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    if os.environ["RANK"] == sys.argv[-1]:
        resuming._note = killed  # type: ignore[assignment]
    session().sum(1.0)


if __name__ == "__main__":
    main()
