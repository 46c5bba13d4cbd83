"""The job's status for the demo: `GetStatus` of the master that the agents started on this machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc

from dalsegno.protos import control_pb2, control_pb2_grpc
from dalsegno.protos.contract import CONTROL_PROTOCOL

ANSWER_WITHIN = 1.0
FORMS = {control_pb2.FORM_SHARDED: "sharded", control_pb2.FORM_UNIVERSAL: "universal"}


@dataclass(frozen=True)
class JobStatus:
    """What the demo shows of the job. `changes`: epoch -> (cause, form that was loaded)."""

    phase: str
    reason: str
    roles: Mapping[str, str]
    group_ranks: Mapping[str, int]
    changes: Mapping[int, tuple[str, str]]


def read_status(checkpoint_dir: Path, job_id: str) -> JobStatus | None:
    """Asks the job's embedded master; None if there is none, or if it doesn't answer within a second."""
    state = checkpoint_dir / ".dalsegno" / job_id
    try:
        address = json.loads((state / "claim.json").read_text(encoding="utf-8"))["address"]
        token = (state / "token").read_text(encoding="utf-8").strip()
    except (FileNotFoundError, KeyError, ValueError):
        return None
    request = control_pb2.StatusRequest(job_id=job_id, protocol=CONTROL_PROTOCOL)
    with grpc.insecure_channel(address) as channel:
        try:
            reply = control_pb2_grpc.ControlStub(channel).GetStatus(
                request, timeout=ANSWER_WITHIN, metadata=(("authorization", f"Bearer {token}"),)
            )
        except grpc.RpcError:
            return None
    return from_reply(reply)


def from_reply(reply: control_pb2.StatusReply) -> JobStatus:
    """The part of a reply that is shown."""
    return JobStatus(
        phase=control_pb2.Phase.Name(reply.phase).removeprefix("PHASE_").lower(),
        reason=reply.reason,
        roles={node.node: node.role for node in reply.nodes},
        group_ranks={node.node: node.group_rank for node in reply.nodes if node.role in ("member", "leaving")},
        changes={record.epoch: (record.cause, FORMS.get(record.form, "")) for record in reply.history},
    )
