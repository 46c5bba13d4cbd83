"""Starts DLRover's own launcher for benchmarks, also on a torch that wants one argument more than it gives."""

from __future__ import annotations

import functools
import runpy
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

if __name__ == "__main__":
    plain = subprocess_handler.SubprocessHandler.__init__

    @functools.wraps(plain)
    def initialize(self: Any, *arguments: Any, **named: Any) -> None:
        """As torch's, without NUMA binding unless it is asked for."""
        named.setdefault("numa_options", None)
        plain(self, *arguments, **named)

    subprocess_handler.SubprocessHandler.__init__ = initialize  # type: ignore[method-assign]
    runpy.run_module("dlrover.trainer.torch.main", run_name="__main__", alter_sys=True)
