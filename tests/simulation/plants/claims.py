"""Bugs of embedded masters that were there once, or nearly, planted again; see `plants` and `claims`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dalsegno.agent.control import claim, embedded, inquiry
from dalsegno.agent.control.claim import Claim, ClaimFile
from dalsegno.agent.control.embedded import EmbeddedMaster
from dalsegno.agent.control.machine import Machine, ProcessPlace

from ..claim_plan import ClaimPlan
from .brain import Plant, Replace


def takes_all_containers_for_one(original: Any) -> Any:
    def same(one: str, other: str) -> bool:
        return True

    return same


def takes_a_number_for_a_process(original: Any) -> Any:
    def is_same_process(self: Machine, pid: int, started: int) -> bool:
        status = self.status(pid)
        return status is not None and status.is_of(status.started)

    return is_same_process


def takes_another_boot_for_this_one(original: Any) -> Any:
    def is_reached_from(self: Claim, place: ProcessPlace) -> bool:
        return self.host == place.host and self.net_ns == place.net_ns

    return is_reached_from


def replaces_whoever_does_not_answer(original: Any) -> Any:
    return (*original, embedded._Standing.SILENT)


def takes_a_stranger_for_the_master(original: Any) -> Any:
    return original[:2]


def vouches_only_for_what_it_sees(original: Any) -> Any:
    def renews(self: EmbeddedMaster, known: Claim) -> bool:
        return known.is_seen_from(self._place)

    return renews


def moves_the_counter_under_a_lock_of_its_own(original: Any) -> Any:
    def bump(self: Any, before: Claim) -> Claim | None:
        place = self._machine.place()
        if getattr(self, "renews", None) is None:
            # Until its process ends, stopped or not.
            self.renews = self._machine.lock(self.path.with_name(f"renewer.{place.pid_ns}.{place.net_ns}.lock"))
        if self.renews is None:
            return None
        moved: Claim | None = original(self, before)
        return moved

    return bump


def leaves_a_master_without_a_claim(original: Any) -> Any:
    def publish(self: EmbeddedMaster, made: Claim, process: object) -> None:
        self._claims.write(made, self._closing)

    return publish


def does_not_look_again(original: Any) -> Any:
    def is_as_it_was(self: EmbeddedMaster, now: Claim | None, before: Claim | None, standing: object) -> bool:
        return True

    return is_as_it_was


def watches_for_a_moment(original: Any) -> Any:
    return 1.0


def leaves_a_stopped_master(original: Any) -> Any:
    def end(self: EmbeddedMaster, known: Claim, standing: object) -> None: ...

    return end


def says_nothing(original: Any) -> Any:
    def say_once(self: EmbeddedMaster, text: str, warning: bool) -> None: ...

    return say_once


def _plant(
    owner: Any,
    name: str,
    replace: Replace,
    *caught: str,
    seeds: int,
    suits: Callable[[ClaimPlan], bool],
    first: int = 1,
) -> tuple[str, Plant]:
    made: Any = suits
    return replace.__name__, Plant(owner, name, replace, frozenset(caught), suits=made, seeds=seeds, first=first)


def has(*names: str) -> Callable[[ClaimPlan], bool]:
    """Plans in which one of these happens."""
    return lambda plan: any(name in names for _, name in plan.happenings)


def shared_kernel(plan: ClaimPlan) -> bool:
    """Agents live in several containers of a machine."""
    machines = [number for number, kinds in enumerate(plan.machines) for _ in kinds]
    used = {site for site, _ in plan.agents}
    return len({machines[site] for site in used}) < len(used)


def pods(plan: ClaimPlan) -> bool:
    """Agents reach a master whose process they don't see."""
    kinds = [(number, kind) for number, kinds in enumerate(plan.machines) for kind in kinds]
    used = {kinds[site] + (site,) for site, _ in plan.agents}
    return any(a[0] == b[0] and a != b and a[1] == "pod" and b[1] in ("pod", "machine") for a in used for b in used)


def crowded(plan: ClaimPlan) -> bool:
    """Several agents live on the same machine or in the same container."""
    sites = [site for site, _ in plan.agents]
    return len(set(sites)) < len(sites)


REPLACED, KILLED, WELL = "a living master is not replaced", "no stranger is killed", "all becomes well"
BOUNDED, VOUCHED = "generations are bounded", "who can vouch for a master does"

CLAIM_PLANTS: dict[str, Plant] = dict(
    [
        _plant(claim, "_same", takes_all_containers_for_one, REPLACED, seeds=20, suits=shared_kernel),
        _plant(
            Machine, "is_same_process", takes_a_number_for_a_process, KILLED, WELL, seeds=40, suits=has("reuse_number")
        ),
        _plant(
            Claim,
            "is_reached_from",
            takes_another_boot_for_this_one,
            KILLED,
            WELL,
            seeds=40,
            suits=has("reboot"),
            first=39,
        ),
        _plant(embedded, "_REPLACED", replaces_whoever_does_not_answer, REPLACED, seeds=20, suits=has("slow_master")),
        _plant(
            inquiry, "_STRANGERS", takes_a_stranger_for_the_master, WELL, seeds=40, suits=has("reuse_port"), first=47
        ),
        _plant(
            EmbeddedMaster,
            "_renews",
            vouches_only_for_what_it_sees,
            VOUCHED,
            seeds=40,
            suits=lambda plan: pods(plan) and has("kill_agents", "kill_agent", "leave")(plan),
        ),
        _plant(
            ClaimFile,
            "bump",
            moves_the_counter_under_a_lock_of_its_own,
            VOUCHED,
            seeds=40,
            suits=lambda plan: crowded(plan) and has("freeze_agent")(plan),
        ),
        _plant(
            EmbeddedMaster, "_publish", leaves_a_master_without_a_claim, BOUNDED, seeds=20, suits=has("full_directory")
        ),
        _plant(EmbeddedMaster, "_is_as_it_was", does_not_look_again, REPLACED, seeds=20, suits=crowded),
        _plant(
            embedded,
            "_LEAST_WATCH_SECONDS",
            watches_for_a_moment,
            REPLACED,
            seeds=40,
            suits=lambda plan: len(plan.machines) > 1 and plan.node_timeout < 5.0,
        ),
        _plant(EmbeddedMaster, "_end", leaves_a_stopped_master, WELL, seeds=40, suits=has("stop_master")),
        _plant(EmbeddedMaster, "_say_once", says_nothing, WELL, seeds=40, suits=has("freeze_all"), first=60),
    ]
)
