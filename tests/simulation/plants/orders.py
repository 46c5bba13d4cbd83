"""Bugs planted in what orders of people do; see `plants`."""

from __future__ import annotations

from typing import Any

from dalsegno.agent.decisions.decision import Decision
from dalsegno.master.brain import checkpoints, milestones, orders, registration
from dalsegno.master.brain.published import Milestone
from dalsegno.master.brain.state import Job, Node
from dalsegno.master.brain.turn import Turn

from ..plan import Plan
from ..workers import Group
from .brain import Plant, plant


def never_tells_the_ranks(original: Any) -> Any:
    def tell(self: Group, *flags: Any) -> None:
        original(self, *flags[:5])

    return tell


def waits_for_a_goodbye(original: Any) -> Any:
    def lose_deserters(turn: Turn) -> bool:
        return False

    return lose_deserters


def lets_a_stopped_jobs_leavers_go_as_if_nothing_was(original: Any) -> Any:
    def exit_left(self: Decision) -> None:
        if self.state.leave is not None and self.state.leave.stop:
            self.exit(1, "the training failed")
            self.state.leave.stop = False
            return
        original(self)

    return exit_left


def starts_what_was_stopped_from_nothing(original: Any) -> Any:
    def take_up_again(turn: Turn) -> None:
        original(turn)
        for record in list(turn.job.checkpoints):
            turn.job.checkpoints.drop(record.digest)

    return take_up_again


def tells_no_node_to_go(original: Any) -> Any:
    def order_to_go(turn: Turn, node: Node) -> None:
        pass

    return order_to_go


def publishes_what_was_never_committed(original: Any) -> Any:
    def not_committed(job: Job, made: Milestone) -> str:
        return ""

    return not_committed


def forgets_what_was_deleted(original: Any) -> Any:
    def forget_pruned(turn: Turn, digests: set[str]) -> None:
        known = turn.job.pruned
        original(turn, digests)
        turn.job.pruned = known

    return forget_pruned


def ordered(name: str) -> Any:
    """Schedules in which somebody gives this order."""

    def suits(plan: Plan) -> bool:
        return any(happening == name for _, happening in plan.happenings)

    return suits


_stopped = ordered("stop_and_start")

ORDER_PLANTS: dict[str, Plant] = dict(
    [
        plant(
            Group, "tell", never_tells_the_ranks, "a save by order is made", kind="planned", suits=ordered("order_save")
        ),
        plant(orders, "lose_deserters", waits_for_a_goodbye, "liveness", suits=_stopped),
        plant(Decision, "exit_left", lets_a_stopped_jobs_leavers_go_as_if_nothing_was, "exit codes", suits=_stopped),
        plant(
            registration,
            "take_up_again",
            starts_what_was_stopped_from_nothing,
            "newest commit",
            "each sample once",
            "committed steps grow",
            suits=_stopped,
        ),
        plant(orders, "order_to_go", tells_no_node_to_go, "liveness", suits=_stopped, first=1200),
        plant(
            milestones,
            "not_committed",
            publishes_what_was_never_committed,
            "only commits are published",
            suits=ordered("publish"),
        ),
        plant(
            checkpoints,
            "forget_pruned",
            forgets_what_was_deleted,
            "only commits are published",
            suits=ordered("publish"),
        ),
    ]
)
