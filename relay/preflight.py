"""What a pod asks of the Commander before it trains."""

from __future__ import annotations

import socket
from typing import Any
from urllib.parse import urlsplit

from dalsegno.protos.addresses import address_of
from dalsegno.protos.contract import Variable
from dalsegno.protos.options import UsageError
from dalsegno.protos.run_file import RunFile

from .milestones.access import Access
from .milestones.commander_client import Away, CommanderClient, Denied

__all__ = ("Away", "ask", "master_of")

# Seconds for a connection to the run's own port.
_CONNECT_SECONDS = 10.0


def ask(file: RunFile, access: Access) -> dict[str, Any]:
    """What the Commander knows of the run.

    Args:
        file: the run.
        access: how the Commander is spoken to.

    Raises:
        Away: it does not answer now, or not where agents go.
        UsageError: it does not know the run, does not let us in, or shows a certificate that is not trusted.
    """
    try:
        shown = CommanderClient(file.commander, file.run_id, access).run()
    except Denied as denied:
        help = {0: "", 404: ": start dlrover-master with --relay and this file"}
        raise UsageError(f"{denied}{help.get(denied.status, f': check {Variable.TOKEN}')}") from denied
    except OSError as error:
        raise Away(f"the certificates cannot be read now: {error}") from error
    port = shown.get("grpc_port")
    if not isinstance(port, int) or not 0 < port < 65536:
        raise Away(f"{file.commander} does not say where the run's master listens")
    try:
        socket.create_connection((_host(file), port), _CONNECT_SECONDS).close()
    except OSError as error:
        why = error.strerror or error
        raise Away(
            f"{file.commander} answers, but not {master_of(file, shown)}, where agents go ({why}): open that port, too "
            "(--port of dlrover-master chooses it)"
        ) from error
    return shown


def master_of(file: RunFile, shown: dict[str, Any]) -> str:
    """HOST:PORT where the run's agents go.

    Args:
        file: the run.
        shown: as `ask` returns it.
    """
    return address_of(_host(file), shown["grpc_port"])


def _host(file: RunFile) -> str:
    return urlsplit(file.commander).hostname or ""
