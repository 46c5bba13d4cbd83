"""Bugs planted in memory checkpoints: what counts as held, who stays for it, and what leavers write; see `plants`."""

from __future__ import annotations

from typing import Any

from dalsegno.agent.decisions import leaving
from dalsegno.agent.decisions import memory as agents_memory
from dalsegno.agent.decisions.decision import Decision
from dalsegno.agent.decisions.state import AgentState, Spill
from dalsegno.master.brain import memory
from dalsegno.master.brain.live import HeldStep, State
from dalsegno.master.brain.state import Job, Node

from ..memory import Memory
from ..plan import Plan
from .brain import Plant, plant


def takes_what_is_nowhere(original: Any) -> Any:
    def is_whole(job: Job, step: HeldStep) -> bool:
        return any(step.holders.values())

    return is_whole


def joins_with_what_it_has(original: Any) -> Any:
    def gather(self: Memory, action: Any, deliver: Any) -> None:
        if self._wanted(action) in self.steps:
            deliver("")
        else:
            original(self, action, deliver)

    return gather


def releases_who_alone_holds_a_part(original: Any) -> Any:
    def is_needed(state: State, node: Node) -> bool:
        return False

    return is_needed


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


def in_memory(plan: Plan) -> bool:
    return plan.memory_every > 0


MEMORY_PLANTS: dict[str, Plant] = dict(
    [
        plant(
            memory,
            "is_whole",
            takes_what_is_nowhere,
            "held as a whole",
            also=((Memory, "gather", joins_with_what_it_has),),
            suits=in_memory,
            first=38,
        ),
        plant(
            memory,
            "is_needed",
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
        ),
    ]
)
