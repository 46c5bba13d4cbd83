"""What a run was, read back from the checkpoints that were sealed."""

from __future__ import annotations

from dalsegno.protos import control_pb2

__all__ = ("last_number", "lineage")


def last_number(name: str) -> int:
    """The attempt in `step-<n>.e<epoch>.<attempt>`, or the lease in a later form's name; 0 for another name."""
    last = name.rpartition(".")[2]
    return int(last) if last.isdigit() else 0


def lineage(found: list[control_pb2.Checkpoint]) -> list[control_pb2.Checkpoint]:
    """The newest lineage among sealed checkpoints, oldest first, followed back from resume point to resume point."""
    attempts: dict[tuple[int, int], control_pb2.Checkpoint] = {}
    for message in sorted(found, key=lambda message: last_number(message.ref.name)):
        if message.form == control_pb2.FORM_SHARDED:
            attempts[message.epoch, message.step] = message
    sharded = list(attempts.values())
    by_digest = {message.ref.digest: message for message in sharded}
    chain: list[control_pb2.Checkpoint] = []
    last = max(sharded, key=lambda message: (message.epoch, message.step), default=None)
    while last is not None:
        of_epoch = [message for message in sharded if message.epoch == last.epoch and message.step <= last.step]
        chain.extend(sorted(of_epoch, key=lambda message: -message.step))
        source = by_digest.get(of_epoch[0].resumed_from.digest)
        last = source if source is not None and source.epoch < last.epoch else None
    return chain[::-1]
