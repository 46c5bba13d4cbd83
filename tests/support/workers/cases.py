"""How training processes begin a case, and end with a file of what came of their cases."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from dalsegno.elastic.training import entry


def begin(port: int) -> None:
    """Before each case: a process has one session, and its group needs a store that nobody has used.

    Args:
        port: where that store is, or will be.
    """
    os.environ["MASTER_PORT"] = str(port)
    close()


def close() -> None:
    """Closes the session of the case before."""
    while entry._sessions:
        entry._sessions.pop().close()


def run_all(run: Callable[[Any], Any]) -> NoReturn:
    """All of a process: the cases of its first argument (JSON, each with the port of its store), one after the other.

    Args:
        run: one case; returns what came of it. The directory of all ranks' results is the second argument.
    """
    results = []
    for case in json.loads(sys.argv[1]):
        begin(case["port"])
        results.append(run(case))
    end(results, Path(sys.argv[2]))


def end(results: Any, directory: Path, *, name: str = "result") -> NoReturn:
    """Writes `<name>-<rank>.json`, waits for the other ranks, and ends this process.

    Args:
        results: what came of the cases on this rank, for `json`.
        directory: of all ranks' files.
        name: how their names begin.
    """
    (directory / f"{name}-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(results), encoding="utf-8")
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    # The interpreter's own end sometimes meets a gloo thread that still lets go of a tensor: "terminate called without
    # an active exception", exit code -6 after finished work (seen in one exit of 15).
    os._exit(0)
