"""Where the world's store is, whatever the script has done to the variables that say so."""

from __future__ import annotations

import os

from dalsegno.protos.contract import Variable

from .remarks import remark

__all__ = ["put_back"]


def put_back() -> None:
    """Gives MASTER_ADDR and MASTER_PORT the agent's values again, and says so if the script has set others.

    Tutorials do so for processes that a script starts by itself. Here nobody listens there, and whoever made a process
    group would wait for ever.
    """
    given = os.environ.get(Variable.STORE)
    if not given:
        return
    host, _, port = given.rpartition(":")
    there = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if there == (host, port):
        return
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=port)
    if os.environ.get("RANK") == "0":
        remark(
            "the script has set MASTER_ADDR and MASTER_PORT to %s:%s, where nobody listens; %s is put back: leave both"
            " to dlrover-run",
            *there,
            given,
        )
