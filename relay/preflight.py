"""What a pod asks of the Commander before it trains."""

from __future__ import annotations

from typing import Any

from dalsegno.protos.contract import Variable
from dalsegno.protos.options import UsageError
from dalsegno.protos.run_file import RunFile

from .milestones.access import Access
from .milestones.commander_client import Away, CommanderClient, Denied

__all__ = ("Away", "ask")


def ask(file: RunFile, access: Access) -> dict[str, Any]:
    """What the Commander knows of the run.

    Args:
        file: the run.
        access: how the Commander is spoken to.

    Raises:
        Away: it does not answer now.
        UsageError: it does not know the run, does not let us in, or shows a certificate that is not trusted.
    """
    try:
        shown = CommanderClient(file.commander, file.run_id, access).run()
    except Denied as denied:
        help = {0: "", 404: ": start dlrover-master with --relay and this file"}
        raise UsageError(f"{denied}{help.get(denied.status, f': check {Variable.TOKEN}')}") from denied
    except OSError as error:
        raise Away(f"the certificates cannot be read now: {error}") from error
    if not isinstance(shown.get("grpc_port"), int):
        raise Away(f"{file.commander} does not say where the run's master listens")
    return shown
