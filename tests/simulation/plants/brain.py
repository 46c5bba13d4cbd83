"""Bugs planted on purpose, at least one per invariant: the simulator must see each of them.

A plant replaces functions of the code under test while a schedule runs; the ledger keeps using the right ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

from dalsegno.agent.decisions import directives, handling, leaving, ranks
from dalsegno.agent.decisions import events as ev
from dalsegno.agent.decisions.decision import Decision
from dalsegno.master.brain import (
    announcements,
    beside,
    brain,
    calls,
    checkpoints,
    conversion,
    failures,
    forming,
    growing,
    listening,
    membership,
    recollection,
    refusals,
    registration,
    running,
    scaling,
    shapes,
    views,
)
from dalsegno.master.brain.live import State
from dalsegno.master.brain.presences import Presences
from dalsegno.master.brain.state import Checkpoint, Drain, Job, MemberState, Node, Phase
from dalsegno.master.brain.turn import Turn, world_of
from dalsegno.master.record.codec import JobCodec
from dalsegno.protos import control_pb2

from ..plan import Plan
from ..syncs import DrainSave
from ..workers import Collective

Replace = Callable[[Any], Any]


@dataclass(frozen=True)
class Plant:
    """`owner.name` becomes `replace(original)`; one of the invariants `caught` must fail within `seeds` schedules.

    Where only some schedules can show it, `kind` names them, or `suits` tells them, and only they are run and counted.
    """

    owner: Any
    name: str
    replace: Replace
    caught: frozenset[str]
    kind: str = ""
    seeds: int = 60
    # Further replacements that the same bug takes.
    also: tuple[tuple[Any, str, Replace], ...] = ()
    suits: Callable[[Plan], bool] = lambda plan: True
    # The seed from which on they are looked for: of those that show it late, one that is near. So a plant that shows
    # nothing any more fails at once, and not after minutes.
    first: int = 1

    def is_shown_by(self, plan: Plan) -> bool:
        return self.kind in ("", plan.kind) and self.suits(plan)


@contextlib.contextmanager
def planted(plant: Plant) -> Iterator[None]:
    """While it lasts, the bug is there, wherever the functions were imported to, or stand in a table."""
    with contextlib.ExitStack() as stack:
        for owner, name, replace in ((plant.owner, plant.name, plant.replace), *plant.also):
            original = getattr(owner, name)
            replacement = replace(original)
            stack.enter_context(mock.patch.object(owner, name, replacement))
            for where, module in list(sys.modules.items()):
                ours = where.startswith(("dalsegno.master", "dalsegno.agent"))
                if not ours:
                    continue
                if getattr(module, name, None) is original:
                    stack.enter_context(mock.patch.object(module, name, replacement))
                for table in [one for one in vars(module).values() if isinstance(one, dict)]:
                    if held := {key: replacement for key, value in table.items() if value is original}:
                        stack.enter_context(mock.patch.dict(table, held))
        yield


# ---- the bugs -------------------------------------------------------------------------------------------------------


def opens_without_raising_the_epoch(original: Any) -> Any:
    def open_world(turn: Turn, nodes: list[Node], resume: Checkpoint | None) -> None:
        original(turn, nodes, resume)
        job = turn.job
        if job.epoch > 1 and job.opened is not None:
            job.epoch -= 1
            job.opened = dataclasses.replace(job.opened, world=dataclasses.replace(job.opened.world, epoch=job.epoch))

    return open_world


def forgets_an_epoch_on_restart(original: Any) -> Any:
    def recover(job: Job, generation: int, now: float) -> State:
        if job.epoch and not job.phase.has_workers:
            job.epoch -= 1
            job.opened = None
        state: State = original(job, generation, now)
        return state

    return recover


def leaves_rows_of_the_master_before(original: Any) -> Any:
    def decode(self: JobCodec, rows: Mapping[str, bytes]) -> Job:
        job: Job = original(self, rows)
        self._decoded = frozenset()
        return job

    return decode


def opens_another_world_in_the_same_epoch(original: Any) -> Any:
    def recover(job: Job, generation: int, now: float) -> State:
        if job.opened is not None and len(job.opened.world.members) > 1:
            *members, last = job.opened.world.members
            del job.opened.parts[last.incarnation]
            world = dataclasses.replace(job.opened.world, members=tuple(members))
            job.opened = dataclasses.replace(job.opened, world=world)
        state: State = original(job, generation, now)
        return state

    return recover


def records_late(turn: Turn, message: control_pb2.Checkpoint) -> bool:
    """What a closed epoch sealed becomes a part of the run. Returns whether it was that."""
    job = turn.job
    late = message.form == control_pb2.FORM_SHARDED and 0 < message.epoch < job.epoch
    if not late or job.checkpoint(message.ref.digest) is not None or message.run_id != job.run_id:
        return False
    job.checkpoints.put(checkpoints.from_proto(message))
    return True


def commits_for_closed_epochs(original: Any) -> Any:
    def commit(turn: Turn, node: Node, message: control_pb2.CommitRequest) -> Any:
        if records_late(turn, message.checkpoint):
            return calls.OK
        return original[control_pb2.CommitRequest](turn, node, message)

    return {**original, control_pb2.CommitRequest: commit}


def adopts_what_older_epochs_sealed(original: Any) -> Any:
    def adopt_sealed(turn: Turn, inventory: Any, by: Node, **more: Any) -> None:
        for message in inventory:
            records_late(turn, message)
        original(turn, inventory, by, **more)

    return adopt_sealed


def prunes_everything(original: Any) -> Any:
    def prunable(job: Job) -> list[Checkpoint]:
        return list(job.checkpoints)

    return prunable


def retires_what_is_in_use(original: Any) -> Any:
    def in_use_digests(job: Job) -> set[str]:
        return set()

    return in_use_digests


def forgets_the_best(original: Any) -> Any:
    def bests(kept: Any) -> set[str]:
        return set()

    return bests


def prunes_damaged_at_once(original: Any) -> Any:
    def prunable(job: Job) -> list[Checkpoint]:
        return [record for record in job.checkpoints if record.retired]

    return prunable


def deletes_late_checkpoints_at_once(original: Any) -> Any:
    def note_late(turn: Turn, late: Any) -> None:
        turn.job.late = [checkpoints.from_proto(message) for message in late]

    return note_late


def tells_late_members_a_newer_checkpoint(original: Any) -> Any:
    def world_proto(job: Job, world: Any) -> control_pb2.World:
        newest = checkpoints.resume_point(job)
        other = dataclasses.replace(world, resume=newest.digest if newest is not None else "")
        message: control_pb2.World = original(job, other)
        return message

    return world_proto


def skips_the_resume_point(original: Any) -> Any:
    def resume_point(job: Job) -> Checkpoint | None:
        usable = [record for record in job.checkpoints if not record.retired]
        return usable[0] if usable else None

    return resume_point


def starts_from_nothing(original: Any) -> Any:
    def open_world(turn: Turn, nodes: list[Node], resume: Checkpoint | None) -> None:
        original(turn, nodes, None)

    return open_world


def grows_before_a_step(original: Any) -> Any:
    def wants_to_grow(turn: Turn) -> bool:
        turn.update_run(has_session=False)
        world = world_of(turn)
        return bool(membership.newcomers(turn)) and len(world.members) < turn.job.settings.max_nodes

    return wants_to_grow


def grows_at_once(original: Any) -> Any:
    def grow_interval(turn: Turn) -> float:
        return 0.0

    return grow_interval


def forgets_the_limit(original: Any) -> Any:
    def select(turn: Turn, nodes: list[Node]) -> list[Node]:
        limit, turn.job.limit = turn.job.limit, 0
        chosen: list[Node] = original(turn, nodes)
        turn.job.limit = limit
        return chosen

    return select


def never_shrinks(original: Any) -> Any:
    def wants_to_shrink(turn: Turn) -> bool:
        return False

    return wants_to_shrink


def says_nothing_of_the_unheard(original: Any) -> Any:
    def without_steps(turn: Turn, world: Any) -> None:
        return None

    return without_steps


def waits_for_nobody(original: Any) -> Any:
    def is_gathered(turn: Turn, gathering: list[Node], ready: list[Node]) -> bool:
        turn.update_next(quiet=False)
        gathered: bool = original(turn, gathering, ready)
        return gathered

    return is_gathered


def opens_below_min(original: Any) -> Any:
    def select(turn: Turn, nodes: list[Node]) -> list[Node]:
        return nodes[: turn.job.settings.max_nodes]

    return select


def loads_another_shape_as_it_is(original: Any) -> Any:
    def loads_now(job: Job, record: Checkpoint, world_size: int) -> bool:
        job.checkpoints.put(dataclasses.replace(record, any_world_size=True))
        return True

    return loads_now


def reshards_whatever_was_asked_for(original: Any) -> Any:
    def resharded(job: Job, record: Checkpoint, world_size: int) -> bool:
        return record.reshards and record.world_size != world_size

    return resharded


def opens_without_what_is_owed(original: Any) -> Any:
    def holds(turn: Turn, ready: bool) -> bool:
        return False

    return holds


def forgets_what_is_owed_at_a_restart(original: Any) -> Any:
    def recover(job: Job, *rest: Any) -> State:
        if job.conversion is not None and job.conversion.beside:
            job.next = dataclasses.replace(job.next, conversion=None)
        state: State = original(job, *rest)
        return state

    return recover


def never_gives_up_resharding(original: Any) -> Any:
    return lambda turn, record: None


def takes_the_blind(original: Any) -> Any:
    def is_candidate(turn: Turn, node: Node) -> bool:
        candidate: bool = original(turn, turn.update(node, sees_directory=True))
        return candidate

    return is_candidate


def never_replaces_a_converter(original: Any) -> Any:
    def check_owner(turn: Turn, held: Any) -> Any:
        return held

    return check_owner


def counts_only_files(original: Any) -> Any:
    def report(turn: Turn, node: Node, request: control_pb2.ConversionReport) -> tuple[str, str]:
        request.bytes_done = 0
        answer: tuple[str, str] = original(turn, node, request)
        return answer

    return report


def hears_only_verdicts(original: Any) -> Any:
    def verified(turn: Turn, node: Node, request: control_pb2.VerificationReport) -> tuple[str, str]:
        answer: tuple[str, str] = ("OK", "") if request.working else original(turn, node, request)
        return answer

    return verified


def asks_for_a_verdict_only_twice(original: Any) -> Any:
    def verify_pause(verification: Any) -> float:
        return original(verification) if len(verification.unable) < 2 else 1e9

    return verify_pause


def never_sees_a_stall(original: Any) -> Any:
    def stalled(turn: Turn) -> bool:
        return False

    return stalled


def counts_the_finished_as_at_work(original: Any) -> Any:
    def stalled(turn: Turn) -> bool:
        return MemberState.FINISHED not in turn.job.parts.values() and original(turn)

    return stalled


def takes_the_time_between_heartbeats_for_deafness(original: Any) -> Any:
    return 0.05


def believes_the_first_reader(original: Any) -> Any:
    def acquit(turn: Turn, verification: Any, record: Checkpoint) -> None:
        checkpoints.retire(turn.job, record, damaged=True)
        turn.notice(f"{record.name} is damaged", True)

    return acquit


def retires_without_a_word(original: Any) -> Any:
    def retire(job: Job, record: Checkpoint, damaged: bool) -> None:
        original(job, record, False)

    return retire


def gives_up_at_the_first_failure(original: Any) -> Any:
    def hopeless(turn: Turn) -> bool:
        return True

    return hopeless


def forgets_what_agents_remember(original: Any) -> Any:
    def remember(*args: Any, **kwargs: Any) -> None:
        return None

    return remember


def takes_the_first_agents_settings(original: Any) -> Any:
    def restore_settings(*args: Any) -> None:
        return None

    return restore_settings


def takes_late_news_for_news(original: Any) -> Any:
    def is_of_this(*args: Any) -> bool:
        return True

    return is_of_this


def ends_with_the_first_who_finishes(original: Any) -> Any:
    def end_of_epoch(turn: Turn) -> bool:
        if MemberState.FINISHED in turn.job.parts.values():
            running.end(turn, Phase.SUCCEEDED, "one of them finished")
            return True
        ended: bool = original(turn)
        return ended

    return end_of_epoch


def reports_the_end_before_the_commit(original: Any) -> Any:
    def report_ended(self: Any) -> None:
        reading, self.state.errands.reading = self.state.errands.reading, frozenset()
        original(self)
        self.state.errands.reading = reading

    return report_ended


def ignores_a_notice(original: Any) -> Any:
    def signalled(self: Any, event: Any) -> None:
        original(self, event)
        self.kill_workers()

    return signalled


def calls_everything_saved(original: Any) -> Any:
    def exit_left(self: Any) -> None:
        self.exit(ev.EXIT_LEFT, "everything is saved")

    return exit_left


def starts_beside_old_workers(original: Any) -> Any:
    def ordered_gather(self: Any, gather: control_pb2.Gather) -> None:
        workers, self.state.workers = self.state.workers, handling.Workers.NONE
        original(self, gather)
        if workers is handling.Workers.STOPPING:
            self.state.workers = workers

    return ordered_gather


def exits_well_from_a_failed_job(original: Any) -> Any:
    def ordered_finish(self: Any, finish: control_pb2.Finish) -> None:
        self.exit(ev.EXIT_FINISHED, finish.message)

    return ordered_finish


def leaves_before_the_write_has_ended(original: Any) -> Any:
    def settle(self: Collective, drain: bool) -> None:
        self.flight = None
        self._saved(drain, None)

    return settle


def gives_up_a_slow_save(original: Any) -> Any:
    def saving(turn: Turn, drain: Drain, drained: bool) -> bool:
        deadline = turn.drain_life.deadline
        if drain.optional:
            deadline = max(deadline, turn.open.moved + turn.job.settings.drain_timeout)
        if turn.overdue(deadline):
            running.give_up_drain(turn, drain)
            return True
        return False

    return saving


def gives_up_with_the_leaver(original: Any) -> Any:
    def saving(turn: Turn, drain: Drain, drained: bool) -> bool:
        if not drain.optional and turn.overdue(turn.drain_life.deadline):
            running.give_up_drain(turn, drain)
            return True
        going_on: bool = original(turn, drain, drained)
        return going_on

    return saving


def fails_with_the_leaver(original: Any) -> Any:
    def end_apart(self: DrainSave) -> None:
        for group in self._collective.groups.values():
            group.crash(1)

    return end_apart


def skips_a_sample(original: Any) -> Any:
    def init(self: Collective, sim: Any, world: control_pb2.World) -> None:
        original(self, sim, world)
        if world.HasField("resume"):
            self.step += 1

    return init


def counts_before_it_hears_anybody(original: Any) -> Any:
    def recover(*given: Any, **named: Any) -> State:
        state: State = original(*given, **named)
        state.live.clock.expects, state.live.clock.word_shown = False, float("-inf")
        return state

    return recover


def looks_at_the_silent_too_late(original: Any) -> Any:
    def next_look(self: Presences, timeout: float) -> float | None:
        look = original(self, timeout)
        return None if look is None else look + timeout / 2

    return next_look


def forgets_who_was_near(original: Any) -> Any:
    def taken(self: Presences, until: float) -> list[str]:
        names = original(self, until)
        return list(names[:-1])

    return taken


def takes_the_last_ones_directory(original: Any) -> Any:
    def sees(job: Job, probe: str) -> bool:
        job.probe = probe or job.probe
        return bool(probe)

    return sees


def plant(
    owner: Any,
    name: str,
    replace: Replace,
    *caught: str,
    kind: str = "",
    also: tuple[tuple[Any, str, Replace], ...] = (),
    suits: Callable[[Plan], bool] = lambda plan: True,
    first: int = 1,
) -> tuple[str, Plant]:
    return replace.__name__, Plant(owner, name, replace, frozenset(caught), kind, also=also, suits=suits, first=first)


def takes_a_refusing_node_again(original: Any) -> Any:
    def put_aside(turn: Turn) -> None:
        original(turn)
        for node in [node for node in turn.job.nodes.values() if node.refused]:
            turn.update(node, refused="")

    return put_aside


def tries_what_all_refuse_again(original: Any) -> Any:
    def ends_job(turn: Turn) -> bool:
        return False

    return ends_job


def says_what_ended_it_twice(original: Any) -> Any:
    def end_refused(turn: Turn) -> None:
        original(turn)
        turn.notice(turn.job.message, True)

    return end_refused


def takes_a_refusal_for_a_failure(original: Any) -> Any:
    def worker_refused(decision: Decision, refusal: str, code: int) -> None:
        decision.state.epoch.outcome = handling.Outcome.FAILED
        ranks.report_failure(decision, refusal, code & 0xFF)
        decision.kill_workers()

    return worker_refused


def counts_what_a_newcomer_brought(original: Any) -> Any:
    def blames_shape(turn: Turn) -> bool:
        return False

    return blames_shape


def tries_what_failed_again(original: Any) -> Any:
    def best(turn: Turn, nodes: list[Node], counts: range) -> list[Node]:
        return nodes[: counts[0]]

    return best


def refuses_sizes(plan: Plan) -> bool:
    """The script fails with some numbers of workers, and with nothing else."""
    return bool(plan.bad_sizes) and plan.settings.max_restarts < 3


def is_slow(plan: Plan) -> bool:
    """A sync outlasts a notice."""
    return plan.sync_time > plan.settings.drain_timeout


def makes_files_beside(plan: Plan) -> bool:
    """Of what a world has re-sharded universal files are made while it trains."""
    return plan.reshards and plan.settings.universal_checkpoint and not plan.settings.universal_gate


def slowly_read(plan: Plan) -> bool:
    return plan.slow_disk


def refuses(plan: Plan) -> bool:
    """Some rank refuses, or all do."""
    return any(name in ("refusing_node", "changed_script") for _, name in plan.happenings)


PLANTS: dict[str, Plant] = dict(
    [
        plant(forming, "open_world", opens_without_raising_the_epoch, "one world per epoch", "epochs grow"),
        plant(brain, "recover", forgets_an_epoch_on_restart, "epochs grow", kind="masters", first=560),
        plant(JobCodec, "decode", leaves_rows_of_the_master_before, "the record is the job", first=534),
        plant(brain, "recover", opens_another_world_in_the_same_epoch, "one world per epoch", first=19),
        plant(calls, "HANDLERS", commits_for_closed_epochs, "closed epochs", kind="late", first=340),
        plant(checkpoints, "adopt_sealed", adopts_what_older_epochs_sealed, "closed epochs"),
        plant(checkpoints, "prunable", prunes_everything, "deleted only when retired", first=23),
        plant(checkpoints, "in_use_digests", retires_what_is_in_use, "what is in use stays", "no event is set aside"),
        plant(checkpoints, "bests", forgets_the_best, "the best stays"),
        plant(
            checkpoints, "prunable", prunes_damaged_at_once, "damaged files stay for a while", kind="convert", first=142
        ),
        plant(
            checkpoints,
            "note_late",
            deletes_late_checkpoints_at_once,
            "what came too late stays for a while",
            kind="late",
            first=1320,
        ),
        plant(views, "world_proto", tells_late_members_a_newer_checkpoint, "same resume point"),
        plant(checkpoints, "resume_point", skips_the_resume_point, "newest commit", "committed steps grow"),
        plant(forming, "open_world", starts_from_nothing, "newest commit"),
        plant(running, "wants_to_grow", grows_before_a_step, "a step between growths", first=50),
        plant(growing, "grow_interval", grows_at_once, "the interval between growths", kind="planned", first=3780),
        plant(announcements, "without_steps", says_nothing_of_the_unheard, "worlds are presented", kind="planned"),
        plant(forming, "is_gathered", waits_for_nobody, "quiet time"),
        plant(membership, "select", opens_below_min, "size of the world", first=17),
        plant(membership, "select", forgets_the_limit, "scaled", kind="planned", first=262),
        plant(scaling, "wants_to_shrink", never_shrinks, "scaled in time", kind="planned", first=392),
        plant(checkpoints, "loads_now", loads_another_shape_as_it_is, "loads"),
        plant(checkpoints, "resharded", reshards_whatever_was_asked_for, "loads", first=15),
        plant(
            beside,
            "holds",
            opens_without_what_is_owed,
            "universal files at each change",
            suits=makes_files_beside,
            first=69,
        ),
        plant(
            brain,
            "recover",
            forgets_what_is_owed_at_a_restart,
            "universal files at each change",
            suits=lambda plan: makes_files_beside(plan) and any("crash" in name for _, name in plan.happenings),
            first=5390,
        ),
        plant(
            checkpoints,
            "give_up_resharding",
            never_gives_up_resharding,
            "liveness",
            suits=lambda plan: plan.reshards and plan.cannot_reshard and not plan.settings.universal_checkpoint,
            first=2064,
        ),
        plant(Presences, "next_look", looks_at_the_silent_too_late, "the dead are noticed"),
        plant(Presences, "_taken", forgets_who_was_near, "the dead are noticed"),
        plant(membership, "is_candidate", takes_the_blind, "members see the directory", kind="disk"),
        plant(
            registration,
            "sees",
            takes_the_last_ones_directory,
            "one directory",
            kind="disk",
            suits=lambda plan: plan.blind_start,
        ),
        plant(conversion, "check_owner", never_replaces_a_converter, "liveness", kind="convert", first=142),
        plant(conversion, "report", counts_only_files, "who moves keeps the lease", kind="convert"),
        plant(conversion, "verified", hears_only_verdicts, "liveness", kind="disk", suits=slowly_read, first=190),
        plant(conversion, "verify_pause", asks_for_a_verdict_only_twice, "liveness", kind="disk", first=1547),
        plant(running, "stalled", never_sees_a_stall, "liveness", kind="crashes"),
        plant(running, "stalled", counts_the_finished_as_at_work, "liveness", kind="crashes", first=2100),
        plant(listening, "DEAF_AFTER", takes_the_time_between_heartbeats_for_deafness, "liveness", kind="crashes"),
        plant(conversion, "acquit", believes_the_first_reader, "no verifying checkpoint is skipped", first=180),
        plant(checkpoints, "retire", retires_without_a_word, "committed steps grow", first=140),
        plant(running, "hopeless", gives_up_at_the_first_failure, "no failure without a reason"),
        plant(recollection, "remember", forgets_what_agents_remember, "one world per epoch", "epochs grow", first=24),
        plant(recollection, "restore_settings", takes_the_first_agents_settings, "settings stand", kind="store"),
        plant(running, "is_of_this", takes_late_news_for_news, "its own save failed", kind="unheard", first=71),
        plant(running, "end_of_epoch", ends_with_the_first_who_finishes, "the end is saved"),
        plant(handling, "report_ended", reports_the_end_before_the_commit, "the end is saved"),
        plant(leaving, "signalled", ignores_a_notice, "planned changes lose nothing", first=15),
        plant(Decision, "exit_left", calls_everything_saved, "left with everything saved", first=24),
        plant(directives, "ordered_gather", starts_beside_old_workers, "one epoch at a time"),
        plant(directives, "ordered_finish", exits_well_from_a_failed_job, "exit codes"),
        plant(brain, "recover", counts_before_it_hears_anybody, "planned changes lose nothing", kind="away", first=585),
        plant(running, "saving", gives_up_a_slow_save, "planned changes lose nothing", suits=is_slow, first=489),
        plant(
            running,
            "saving",
            gives_up_with_the_leaver,
            "planned changes lose nothing",
            kind="planned",
            suits=is_slow,
            first=1346,
        ),
        plant(
            DrainSave,
            "end_apart",
            fails_with_the_leaver,
            "planned changes lose nothing",
            kind="planned",
            suits=is_slow,
            first=1346,
        ),
        plant(refusals, "put_aside", takes_a_refusing_node_again, "who refuses is put aside", suits=refuses, first=656),
        plant(refusals, "ends_job", tries_what_all_refuse_again, "one line", "a refusal ends the job", suits=refuses),
        plant(running, "end_refused", says_what_ended_it_twice, "one line", suits=refuses),
        plant(
            failures,
            "blames_shape",
            counts_what_a_newcomer_brought,
            "a newcomer ends no healthy job",
            suits=refuses_sizes,
        ),
        plant(
            shapes,
            "best",
            tries_what_failed_again,
            "what failed is not tried again",
            kind="planned",
            suits=refuses_sizes,
        ),
        plant(ranks, "worker_refused", takes_a_refusal_for_a_failure, "liveness", suits=refuses, first=24),
        plant(Collective, "_settle", leaves_before_the_write_has_ended, "planned changes lose nothing", first=15),
        plant(Collective, "__init__", skips_a_sample, "each sample once"),
    ]
)
