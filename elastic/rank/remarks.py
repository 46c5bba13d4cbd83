"""Remarks: lines about things that people should know of their training, and that are no mistakes."""

from __future__ import annotations

import logging
import os

from dalsegno.protos.contract import Variable

log = logging.getLogger(__name__)


def remark(text: str, *values: object) -> None:
    """One line in the log and, under ``dlrover-run``, on its console: that shows what workers print, not what they log.

    Args:
        text, values: As for ``logging``.
    """
    log.warning(text, *values)
    if os.environ.get(Variable.SOCKET):
        print(f"dalsegno: {text % values if values else text}", flush=True)
