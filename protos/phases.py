"""The phases of a job as they are told, in groups."""

from __future__ import annotations

from . import control_pb2

__all__ = ("ENDED_PHASES",)

# Those of a job that has ended, well or not, or was stopped.
ENDED_PHASES = (control_pb2.PHASE_SUCCEEDED, control_pb2.PHASE_FAILED, control_pb2.PHASE_STOPPED)
