"""Remarks: lines about a training that people should know and that are not errors."""

from __future__ import annotations

import logging
import os

from dalsegno.protos.contract import Variable

log = logging.getLogger(__name__)


def remark(text: str, *values: object) -> None:
    """Writes one line to the log and, under ``dlrover-run``, to the console, which shows only what workers print.

    Args:
        text, values: As for ``logging``.
    """
    log.warning(text, *values)
    if os.environ.get(Variable.SOCKET):
        print(f"dalsegno: {text % values if values else text}", flush=True)
