"""What a pod asks of the Commander before it trains."""

from __future__ import annotations

import os
from typing import Any

from dalsegno.protos.contract import Variable
from dalsegno.protos.options import UsageError
from dalsegno.protos.run_file import RunFile

from .milestones.commander import Away, Commander, Denied

__all__ = ("Away", "ask")


def ask(file: RunFile) -> dict[str, Any]:
    """What the Commander knows of the run.

    Raises:
        Away: it does not answer now.
        UsageError: it does not know the run, or does not let us in.
    """
    try:
        shown = Commander(file.commander, file.run_id, os.environ.get(Variable.TOKEN, "")).run()
    except Denied as denied:
        help = "start dlrover-master with --relay and this file" if denied.status == 404 else f"check {Variable.TOKEN}"
        raise UsageError(f"{denied}: {help}") from denied
    if not isinstance(shown.get("grpc_port"), int):
        raise Away(f"{file.commander} does not say where the run's master listens")
    return shown
