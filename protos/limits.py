"""How much one message may carry: what its sender keeps to and its receiver holds it to."""

from __future__ import annotations

__all__ = ("MAX_FINISHED_RUNS", "MAX_INVENTORY", "MAX_UNUSABLE")

MAX_INVENTORY = 256
"""Checkpoints in one `RegisterRequest` or `JoinRequest`."""
MAX_UNUSABLE = 16
"""Checkpoints in sight but unusable in one `JoinRequest`."""
MAX_FINISHED_RUNS = 256
"""Finished runs in one `RegisterRequest`."""
