"""Bugs planted in what is saved, recorded, converted, deleted and read again; see `plants`."""

from __future__ import annotations

import dataclasses
from typing import Any

from dalsegno.agent.decisions import directives
from dalsegno.agent.decisions.decision import Decision
from dalsegno.master.brain import checkpoints, liveness, membership, room, running
from dalsegno.master.brain.checkpoints import resume_point
from dalsegno.master.brain.state import Checkpoint, Job, Node, Phase
from dalsegno.master.brain.turn import Turn
from dalsegno.protos import control_pb2

from ..disk import Disk
from ..workers import Collective
from .brain import Plant, makes_files_beside, plant


def records_what_nobody_sealed(original: Any) -> Any:
    def from_proto(message: control_pb2.Checkpoint) -> Checkpoint:
        record: Checkpoint = original(message)
        return dataclasses.replace(record, digest=f"{record.digest} of something else")

    return from_proto


def names_without_the_epoch(original: Any) -> Any:
    def name(self: Collective) -> str:
        return f"step-{self.step}.{self.attempt}"

    return name


def lets_a_conversion_run_on(original: Any) -> Any:
    def stop_conversion(self: Decision) -> None:
        self.state.lease = 0

    return stop_conversion


def deletes_what_a_conversion_reads(original: Any) -> Any:
    def side_orders(turn: Decision, directive: control_pb2.Directive) -> None:
        # A lease is only forgotten where no other one comes.
        if not directive.HasField("convert"):
            turn.state.lease = 0
        original(turn, directive)

    return side_orders


def sweeps_what_is_made_beside(original: Any) -> Any:
    def side_orders(decision: Decision, directive: control_pb2.Directive) -> None:
        known = control_pb2.Directive()
        known.CopyFrom(directive)
        known.converting = ""
        original(decision, known)

    return side_orders


def declares_nodes_of_an_ended_job_dead(original: Any) -> Any:
    def check_liveness(turn: Turn) -> bool:
        if turn.job.phase is Phase.SUCCEEDED and any(p.closed is not None for p in turn.live.nodes.values()):
            running.end(turn, Phase.FAILED, "its nodes are gone")
            return True
        moved: bool = original(turn)
        return moved

    return check_liveness


def prunes_the_resume_point(original: Any) -> Any:
    def prunable(job: Job) -> list[Checkpoint]:
        head = resume_point(job)
        return [*original(job), *([head] if head is not None else [])]

    return prunable


def prunes_what_is_being_loaded(original: Any) -> Any:
    def prunable(job: Job) -> list[Checkpoint]:
        loaded = job.checkpoint(job.world.resume) if job.world is not None else None
        return [*original(job), *([loaded] if loaded is not None else [])]

    return prunable


def deletes_the_newest_too(original: Any) -> Any:
    def delete(self: Disk, name: str) -> None:
        original(self, name)
        sharded = [other for other in self.sealed if ".universal." not in other]
        if sharded:
            original(self, sharded[-1])

    return delete


def believes_that_all_see_it(original: Any) -> Any:
    def sees_resume(turn: Turn, node: Node) -> bool:
        return True

    return sees_resume


def deletes_all_for_room(original: int) -> int:
    return 0


FILE_PLANTS: dict[str, Plant] = dict(
    [
        plant(checkpoints, "from_proto", records_what_nobody_sealed, "commits are sealed"),
        plant(Collective, "_name", names_without_the_epoch, "names", kind="crashes", first=105),
        plant(Decision, "stop_conversion", lets_a_conversion_run_on, "one conversion", kind="convert", first=538),
        plant(
            directives,
            "side_orders",
            deletes_what_a_conversion_reads,
            "what is converted stays",
            kind="convert",
            first=142,
        ),
        plant(
            directives,
            "side_orders",
            sweeps_what_is_made_beside,
            "what is converted stays",
            suits=makes_files_beside,
            first=69,
        ),
        plant(liveness, "check_liveness", declares_nodes_of_an_ended_job_dead, "one end"),
        plant(room, "LEAST_KEPT", deletes_all_for_room, "committed steps grow", kind="disk", first=113),
        plant(checkpoints, "prunable", prunes_the_resume_point, "the resume point stays"),
        plant(checkpoints, "prunable", prunes_what_is_being_loaded, "what is loaded stays"),
        plant(
            Disk,
            "delete",
            deletes_the_newest_too,
            "resume point exists",
            kind="crashes",
            also=((membership, "sees_resume", believes_that_all_see_it),),
            first=1375,
        ),
    ]
)
