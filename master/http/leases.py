"""What a lease is, seen from outside: a place in the run's world. Pure: the master's status in, answers out.

The brain knows no leases. A lease is an incarnation that has a place in the open world, and its token is that
incarnation with the secret of which the record keeps a digest. So a token stays valid over a restart of the master, and
nobody else can make one.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dalsegno.protos import control_pb2 as pb
from dalsegno.protos.commander_api import RunState
from dalsegno.protos.contract import LEAST_NODE_TIMEOUT_SECONDS, JobSettings
from dalsegno.protos.phases import ENDED_PHASES
from dalsegno.protos.run_file import RunFile

__all__ = (
    "PREFIX",
    "RANDOM_BYTES",
    "Token",
    "holder_of",
    "in_seconds",
    "known_as",
    "lease_config",
    "leftovers",
    "milestones_of",
    "seconds_left",
    "settings_of",
    "shown",
    "state_of",
)

# How incarnations begin that stand for foreign workers.
PREFIX = "lease-"
# Random bytes of a token: those of the incarnation, and those of its secret.
_NAME_BYTES, _SECRET_BYTES = 16, 32
RANDOM_BYTES = _NAME_BYTES + _SECRET_BYTES
_LONGEST_TOKEN = 512
_VERSION = b"\x01"
_TRAINING = (pb.PHASE_RUNNING, pb.PHASE_DRAINING)


@dataclass(frozen=True)
class Token:
    """A lease's token: which run, which incarnation, and what proves it."""

    run_id: str
    name: bytes
    secret: bytes

    @classmethod
    def drawn(cls, run_id: str, random: bytes) -> Token:
        """A new one from `RANDOM_BYTES` random bytes."""
        return cls(run_id, random[:_NAME_BYTES], random[_NAME_BYTES:])

    @classmethod
    def parse(cls, text: str) -> Token:
        """Raises ValueError, with one line, if this never was a token."""
        problem = "lease_token is no token of a lease: send the one that acquire has given"
        if not text.isascii() or len(text) > _LONGEST_TOKEN:
            raise ValueError(problem)
        try:
            data = base64.b64decode(text.encode(), altchars=b"-_", validate=True)
            run_id = data[1 + RANDOM_BYTES :].decode("ascii")
        except (binascii.Error, UnicodeDecodeError) as error:
            raise ValueError(problem) from error
        if data[:1] != _VERSION or not run_id:
            raise ValueError(problem)
        return cls.drawn(run_id, data[1 : 1 + RANDOM_BYTES])

    @property
    def text(self) -> str:
        """As workers are given it."""
        return base64.urlsafe_b64encode(_VERSION + self.name + self.secret + self.run_id.encode()).decode()

    @property
    def incarnation(self) -> str:
        """The incarnation that it stands for in the brain."""
        return PREFIX + self.name.hex()

    def caller(self, node: str, epoch: int, protocol: int) -> pb.Caller:
        """The caller in the calls that are made for its worker."""
        return pb.Caller(
            job_id=self.run_id,
            node=node,
            incarnation=self.incarnation,
            epoch=epoch,
            protocol=protocol,
            secret=self.secret,
        )


def holder_of(status: pb.StatusReply) -> pb.NodeStatus | None:
    """The node that has the run: that of the open world, or of the last one while it gathers for the next."""
    members = [node for node in status.nodes if node.role == "member"]
    if not members:
        # It may have been told to go. Foreign workers go by a word of theirs, and a spare never does.
        leaving = [node for node in status.nodes if node.role == "leaving"]
        members = [node for node in leaving if status.phase in _TRAINING or node.incarnation.startswith(PREFIX)]
    ended = status.phase in ENDED_PHASES
    return members[0] if members and not ended else None


def known_as(status: pb.StatusReply, incarnation: str) -> pb.NodeStatus | None:
    """The node with this incarnation; None: it is fenced."""
    return next((node for node in status.nodes if node.incarnation == incarnation), None)


def leftovers(status: pb.StatusReply) -> list[pb.NodeStatus]:
    """Foreign workers without a place: those whose run has ended, or whose acquiring was cut off."""
    holder = holder_of(status)
    return [
        node
        for node in status.nodes
        if node.incarnation.startswith(PREFIX) and (holder is None or node.incarnation != holder.incarnation)
    ]


def seconds_left(node: pb.NodeStatus, lease_seconds: float) -> float:
    """How long the node's lease lasts if it stays silent; 0: it is over."""
    return max(0.0, lease_seconds - node.silent_seconds)


def in_seconds(left: float) -> float:
    """The seconds as they are told: to a tenth."""
    return round(left, 1)


def state_of(status: pb.StatusReply) -> RunState:
    """How the run stands."""
    if status.phase == pb.PHASE_SUCCEEDED:
        return RunState.COMPLETED
    if status.phase == pb.PHASE_FAILED:
        return RunState.FAILED
    if holder_of(status) is not None:
        return RunState.RUNNING
    return RunState.PREEMPTED if status.epoch else RunState.WAITING


def settings_of(run: RunFile) -> JobSettings:
    """The settings of the run's job: one node, which may be silent as long as its lease lasts."""
    timeout_seconds = max(LEAST_NODE_TIMEOUT_SECONDS, run.lease_seconds)
    return JobSettings(
        min_nodes=1, max_nodes=1, node_timeout=timeout_seconds, quiet_time=0.0, keep_checkpoints=run.keep_last
    )


def lease_config(run: RunFile, status: pb.StatusReply) -> dict[str, Any]:
    """What a worker is told with its lease: how it is to work, and what was published last."""
    hub, last = run.hf, status.milestones[-1] if status.milestones else None
    improve = None if hub is None or hub.on_improve is None else hub.on_improve.model_dump(mode="json")
    return {
        "config": {
            "l1_root": str(run.l1_root),
            "run_id": run.run_id,
            "ckpt_interval_sec": run.interval_seconds,
            "ckpt_keep_last_n": run.keep_last,
            "hf_sync_interval_sec": None if hub is None else hub.interval_seconds,
            "hf_repo": None if hub is None else hub.repo,
            "hf_push_on_improve": improve,
        },
        "last_hf_repo": None if last is None else last.repo,
        "last_hf_revision": None if last is None else last.revision,
    }


def milestones_of(status: pb.StatusReply) -> list[dict[str, Any]]:
    """The milestones, the newest first."""
    return [
        {
            "repo": made.repo,
            "revision": made.revision,
            "step": made.step,
            "checkpoint": made.checkpoint.name,
            "digest": made.checkpoint.digest,
        }
        for made in reversed(status.milestones)
    ]


def shown(run: RunFile, status: pb.StatusReply, port: int, report: Mapping[str, Any] | None) -> dict[str, Any]:
    """All that is told of a run; `report` is what a foreign worker has said last."""
    holder = holder_of(status)
    left = None if holder is None else in_seconds(seconds_left(holder, run.lease_seconds))
    head = {"name": status.head.ref.name, "step": status.head.step, "digest": status.head.ref.digest}
    return {
        "run_id": run.run_id,
        "grpc_port": port,
        "state": state_of(status).value,
        "holder": None if holder is None else holder.node,
        "epoch": status.epoch,
        "expires_in_sec": left,
        "lease_seconds": run.lease_seconds,
        "step": status.step,
        "head": head if status.HasField("head") else None,
        "milestones": milestones_of(status),
        "report": report,
        "detail": status.reason,
    }
