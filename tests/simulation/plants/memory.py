"""Bugs planted in memory checkpoints: what counts as held, who stays for it, and what leavers write; see `plants`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dalsegno.agent.decisions import handling, last_copy, leaving
from dalsegno.agent.decisions import memory as agents_memory
from dalsegno.agent.decisions import replication as agents_replication
from dalsegno.agent.decisions.decision import Decision
from dalsegno.agent.decisions.state import Admission, AgentState, Join, Spill
from dalsegno.master.brain import brain, checkpoints, durable, ending, memory, places, replication
from dalsegno.master.brain.gathering import Gathering
from dalsegno.master.brain.holders import is_whole
from dalsegno.master.brain.live import HeldStep, Replicas, State
from dalsegno.master.brain.state import Checkpoint, Job, Member, Node
from dalsegno.master.brain.turn import Turn
from dalsegno.master.brain.views import Common
from dalsegno.protos import control_pb2

from ..memory import Memory
from ..plan import Plan
from .brain import Plant, plant


def ends_at_once(original: Any) -> Any:
    def put_off(turn: Turn, message: str, *, notice: bool) -> bool:
        return False

    return put_off


def forgets_that_it_is_over(original: Any) -> Any:
    def recover(job: Job, generation: int, now: float) -> State:
        job.ending = None
        state: State = original(job, generation, now)
        return state

    return recover


def keeps_no_record_of_the_end(original: Any) -> Any:
    """Only a master that has heard of the last save knows of it."""

    def last_save(turn: Turn) -> Checkpoint | None:
        step = durable.due(turn.state)
        return None if step is None else step.record

    return last_save


def waits_for_the_end_all_the_same(original: Any) -> Any:
    def owed(state: State) -> HeldStep | None:
        step: HeldStep | None = durable.due(state) or original(state)
        return step

    return owed


def takes_what_is_nowhere(original: Any) -> Any:
    def is_there(job: Job, step: HeldStep) -> bool:
        return any(step.holders.values())

    return is_there


def forgets_the_buddies(original: Any) -> Any:
    def of_members(job: Job, step: HeldStep, members: Sequence[Member]) -> dict[str, frozenset[int]] | None:
        if tuple(member.nproc for member in members) != step.record.layout:
            found: dict[str, frozenset[int]] | None = original(job, step, members)
            return found
        return {member.incarnation: frozenset({0, member.group_rank}) for member in members}

    return of_members


def fetches_what_lies_in_its_place(original: Any) -> Any:
    def of_members(job: Job, step: HeldStep, members: Sequence[Member]) -> dict[str, frozenset[int]] | None:
        if original(job, step, members) is None:
            return None
        parts = range(step.record.parts)
        return {member.incarnation: frozenset({0, *parts[member.group_rank :][:2]}) for member in members}

    return of_members


def takes_any_parts(original: Any) -> Any:
    def lacks(self: Gathering, node: Node, resume: Checkpoint | None) -> bool:
        return False

    return lacks


def takes_any_place(original: Any) -> Any:
    def fits(turn: Turn, resume: Checkpoint | None, nodes: Sequence[Node]) -> bool:
        return True

    return fits


def never_fetches_the_rest(original: Any) -> Any:
    def could_not_start(turn: Turn, resume: Checkpoint | None) -> bool:
        return False

    return could_not_start


def joins_once(original: Any) -> Any:
    def answers(place: Admission, join: Join, wanted: Join) -> bool:
        return bool(original(place, replace(join, some=None), wanted))

    return answers


def writes_nothing(original: Any) -> Any:
    def write_while_waiting(turn: Turn) -> None:
        return None

    return write_while_waiting


def looks_for_nothing(original: Any) -> Any:
    def who_looks(job: Job, step: HeldStep) -> list[Node]:
        return []

    return who_looks


def joins_with_what_it_has(original: Any) -> Any:
    def gather(self: Memory, action: Any, deliver: Any) -> None:
        if self._wanted(action) in self.steps:
            deliver("")
        else:
            original(self, action, deliver)

    return gather


def releases_who_alone_holds_a_part(original: Any) -> Any:
    def needed(state: State) -> frozenset[str]:
        return frozenset()

    return needed


def leaves_without_writing(original: Any) -> Any:
    def spill(decision: Decision) -> None:
        state: AgentState = decision.state
        ref = agents_memory.needed(state)
        if ref is not None and state.leave is not None:
            state.leave.spill = Spill(ref.digest, over=True)

    return spill


def leaves_from_memory(original: Any) -> Any:
    def is_safe(state: AgentState) -> bool:
        return True

    return is_safe


def counts_on_a_copy(original: Any) -> Any:
    def outlives_it(state: AgentState, digest: str) -> bool:
        return state.leave is not None and last_copy.is_copied(state, digest)

    return outlives_it


def commits_a_part(original: Any) -> Any:
    def heard_of_unrecorded(turn: Turn, node: Node, message: control_pb2.DurableRequest, step: HeldStep) -> None:
        original(turn, node, message, step)
        if message.parts and not message.failure:
            checkpoints.record_written(turn, step.record, node.name)

    return heard_of_unrecorded


def keeps_the_newest_only(original: Any) -> Any:
    def kept(state: AgentState) -> set[str]:
        return set()

    return kept


def counts_its_own_worlds_only(original: Any) -> Any:
    def newest_epoch(state: AgentState) -> int:
        return state.started

    return newest_epoch


def forgets_what_is_wanted(original: Any) -> Any:
    def to_disk(state: AgentState) -> str:
        return ""

    return to_disk


def forgets_the_best(original: Any) -> Any:
    def candidates(state: AgentState) -> set[str]:
        return set()

    return candidates


def takes_the_best_for_any(original: Any) -> Any:
    def is_candidate(job: Job, step: HeldStep) -> bool:
        return False

    return is_candidate


def begins_anew_with_each(original: Any) -> Any:
    def can_go_on(job: Job, step: HeldStep) -> bool:
        return False

    return can_go_on


def counts_what_older_epochs_held(original: Any) -> Any:
    def adopt(turn: Turn) -> bool:
        job, head = turn.job, checkpoints.resume_point(turn.job)
        whole = (step for step in turn.live.held.steps.values() if is_whole(job, step))
        newest = max(whole, key=lambda step: step.record.step, default=None)
        if newest is None or job.checkpoint(newest.record.digest) is not None:
            return False
        if head is not None and head.step >= newest.record.step:
            return False
        checkpoints.put_newer(turn, newest.record)
        return True

    return adopt


def keeps_what_older_epochs_held(original: Any) -> Any:
    def keep(self: Memory, epoch: int, digests: frozenset[str]) -> None:
        """Else nobody could tell: nodes drop what older epochs held when a new one begins."""

    return keep


def tells_no_change_of_what_is_written(original: Any) -> Any:
    def write(self: Common, node: Node) -> tuple[object, ...]:
        return ()

    return write


def sends_one_step_for_ever(original: Any) -> Any:
    def settle(turn: Turn, replicas: Replicas) -> None:
        """It does not notice that it has come."""

    return settle


def in_memory(plan: Plan) -> bool:
    return plan.memory_every > 0


def leaves_unheard(plan: Plan) -> bool:
    return in_memory(plan) and any(name == "leave_unheard" for _, name in plan.happenings)


def by_place(plan: Plan) -> bool:
    return plan.by_place


def slowly_copied(plan: Plan) -> bool:
    return plan.slow_replicas and not plan.walled


MEMORY_PLANTS: dict[str, Plant] = dict(
    [
        plant(replication, "settle", sends_one_step_for_ever, "the next step is sent", suits=in_memory, first=360),
        plant(Common, "write", tells_no_change_of_what_is_written, "directives are told", suits=in_memory),
        plant(
            memory,
            "is_there",
            takes_what_is_nowhere,
            "nodes have what is loaded",
            also=((Memory, "gather", joins_with_what_it_has),),
            suits=in_memory,
            first=38,
        ),
        plant(
            memory,
            "needed",
            releases_who_alone_holds_a_part,
            "planned changes lose nothing",
            "left with everything saved",
            suits=in_memory,
            first=38,
        ),
        plant(
            leaving,
            "spill",
            leaves_without_writing,
            "planned changes lose nothing",
            "left with everything saved",
            also=((leaving, "is_safe", leaves_from_memory),),
            suits=in_memory,
            first=476,
        ),
        plant(last_copy, "outlives_it", counts_on_a_copy, "left with everything saved", suits=leaves_unheard),
        plant(
            memory,
            "adopt",
            counts_what_older_epochs_held,
            "closed epochs",
            also=((Memory, "keep", keeps_what_older_epochs_held),),
            suits=in_memory,
            first=3436,
        ),
        plant(brain, "recover", forgets_that_it_is_over, "over is over", kind="budget", suits=in_memory, first=1287),
        plant(ending, "put_off", ends_at_once, "what fails is on the disk", kind="budget", suits=in_memory, first=532),
        plant(
            memory,
            "who_looks",
            looks_for_nothing,
            "no held step is skipped",
            suits=lambda plan: plan.forgetful,
            first=18400,
        ),
        plant(places, "of_members", forgets_the_buddies, "parts have copies", suits=by_place),
        plant(
            places,
            "of_members",
            fetches_what_lies_in_its_place,
            "nodes have what is loaded",
            suits=lambda plan: bool(plan.lengths),
        ),
        plant(
            ending,
            "last_save",
            keeps_no_record_of_the_end,
            "the end is saved",
            also=((durable, "owed", waits_for_the_end_all_the_same),),
            suits=lambda plan: plan.hasty,
        ),
        plant(
            Gathering,
            "lacks",
            takes_any_parts,
            "nodes have what is loaded",
            also=((places, "fits", takes_any_place),),
            suits=by_place,
            first=3520,
        ),
        plant(
            places,
            "could_not_start",
            never_fetches_the_rest,
            "a refusal ends the job",
            "liveness",
            suits=lambda plan: plan.reads_all,
            first=4544,
        ),
        plant(
            handling,
            "answers",
            joins_once,
            "liveness",
            # What comes to the disk while nodes lack would help.
            also=((durable, "write_while_waiting", writes_nothing),),
            suits=by_place,
        ),
        plant(
            agents_replication,
            "kept",
            keeps_the_newest_only,
            "a step that outlives a node is kept",
            suits=slowly_copied,
        ),
        plant(
            agents_memory, "newest_epoch", counts_its_own_worlds_only, "memory is given back", suits=in_memory, first=81
        ),
        plant(durable, "heard_of_unrecorded", commits_a_part, "commits are on the disk", suits=in_memory),
        plant(
            agents_memory,
            "to_disk",
            forgets_what_is_wanted,
            "wanted steps come to the disk",
            also=(
                (durable, "can_go_on", begins_anew_with_each),
                (agents_memory, "candidates", forgets_the_best),
                (memory, "is_candidate", takes_the_best_for_any),
            ),
            suits=lambda plan: in_memory(plan) and plan.kind == "planned",
        ),
    ]
)
