"""Bugs planted in what is saved, recorded, converted, deleted and read again; see `plants`."""

from __future__ import annotations

from typing import Any

from dalsegno.agent import directives
from dalsegno.agent.turn import Turn as AgentTurn
from dalsegno.master import checkpoints, conversion, membership, phases
from dalsegno.master.checkpoints import resume_point
from dalsegno.master.state import Checkpoint, Job, Node, Phase
from dalsegno.master.turn import Turn
from dalsegno.protos import control_pb2

from .plants import Plant, plant
from .workers import Collective


def records_what_nobody_sealed(original: Any) -> Any:
    def from_proto(message: control_pb2.Checkpoint) -> Checkpoint:
        record: Checkpoint = original(message)
        record.digest += " of something else"
        return record

    return from_proto


def saves_under_the_same_name_again(original: Any) -> Any:
    def save(self: Collective, drain: bool) -> None:
        self.attempt = 0
        original(self, drain)

    return save


def lets_a_conversion_run_on(original: Any) -> Any:
    def stop_conversion(self: AgentTurn) -> None:
        self.state.lease = 0

    return stop_conversion


def deletes_what_a_conversion_reads(original: Any) -> Any:
    def side_orders(turn: AgentTurn, directive: control_pb2.Directive) -> None:
        # A lease is only forgotten where no other one comes.
        if not directive.HasField("convert"):
            turn.state.lease = 0
        original(turn, directive)

    return side_orders


def declares_nodes_of_an_ended_job_dead(original: Any) -> Any:
    def check_liveness(turn: Turn) -> bool:
        if turn.job.phase is Phase.SUCCEEDED and turn.live.closed:
            phases.end(turn, Phase.FAILED, "its nodes are gone")
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


def takes_back_after_damage(original: Any) -> Any:
    def verified(turn: Turn, *args: Any) -> tuple[str, str]:
        answer: tuple[str, str] = original(turn, *args)
        if any(record.damaged for record in turn.job.checkpoints):
            for record in turn.job.checkpoints:
                record.retired = record.damaged
        return answer

    return verified


def believes_that_all_see_it(original: Any) -> Any:
    def sees_resume(turn: Turn, node: Node) -> bool:
        return True

    return sees_resume


def keeps_records_of_deleted_files(original: Any) -> Any:
    def forget_pruned(job: Job, digests: set[str]) -> None:
        return None

    return forget_pruned


FILE_PLANTS: dict[str, Plant] = dict(
    [
        plant(checkpoints, "from_proto", records_what_nobody_sealed, "commits are sealed"),
        plant(Collective, "_save", saves_under_the_same_name_again, "names", kind="disk"),
        plant(AgentTurn, "stop_conversion", lets_a_conversion_run_on, "one conversion", kind="convert"),
        plant(directives, "side_orders", deletes_what_a_conversion_reads, "what is converted stays", kind="convert"),
        plant(membership, "check_liveness", declares_nodes_of_an_ended_job_dead, "one end"),
        plant(checkpoints, "prunable", prunes_the_resume_point, "the resume point stays"),
        plant(checkpoints, "prunable", prunes_what_is_being_loaded, "what is loaded stays"),
        plant(
            conversion,
            "verified",
            takes_back_after_damage,
            "resume point exists",
            kind="convert",
            also=(
                (checkpoints, "forget_pruned", keeps_records_of_deleted_files),
                (membership, "sees_resume", believes_that_all_see_it),
            ),
        ),
    ]
)
