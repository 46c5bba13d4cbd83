"""Reads back what a lost store has forgotten, from the memory of agents and from the checkpoints that they see.

An old copy of a record, which somebody has brought back, is not read back: what it lacks is lost. But no epoch is given
twice, and nobody waits for a world in which its members are no more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from dalsegno.protos import control_pb2
from dalsegno.protos.contract import run_number

from . import checkpoints, membership
from .described import from_proto, to_proto
from .lineage import last_number, lineage
from .state import Node, Run, Settings
from .turn import Turn


def number_of(run_id: str) -> int:
    """The number of a run; 0: its name is no run's."""
    return run_number(run_id) or 0


def remember(
    turn: Turn,
    epoch: int,
    inventory: Iterable[control_pb2.Checkpoint],
    finished_runs: Iterable[str] = (),
    settings: Settings | None = None,
) -> None:
    """Takes an agent's memory of a run, if this store has opened no world: go on above its epoch, from its checkpoints.

    The first such memory starts a listening time of one node-timeout, in which everybody's memory is collected.
    `settings` are those in force that the lost store's master told this agent.
    """
    job = turn.job
    over = set(finished_runs)
    known = list(inventory)
    unfinished = [entry for entry in known if entry.run_id not in over and number_of(entry.run_id) >= job.run.number]
    newest = max(
        [job.run.number, *(number_of(entry.run_id) for entry in unfinished), *(number_of(run) + 1 for run in over)]
    )
    if newest > job.run.number:
        # What was read back so far belongs to a run that is over.
        turn.begin_run(Run(newest))
        job.recollection = replace(job.recollection, settings_epoch=-1)
    mine = [entry for entry in unfinished if entry.run_id == job.run_id]
    merge(turn, mine)
    restore_settings(turn, epoch, settings, mine)
    for entry in mine:
        job.generation = max(job.generation, entry.generation + 1)
    if len(job.checkpoints) > 0:
        turn.update_run(ever_stepped=True)
    highest = max([job.recollection.epoch, epoch, *(entry.epoch for entry in known)])
    job.recollection = replace(job.recollection, epoch=highest, listening=job.recollection.listening or job.epoch == 0)
    if job.epoch > 0:
        job.epoch = max(job.epoch, highest)


def note_newer(turn: Turn, who: str, epoch: int) -> None:
    """An agent that registers remembers an epoch of which the record knows nothing: the next one is above it."""
    job = turn.job
    told = job.recollection.epoch > job.epoch
    if epoch <= max(job.epoch, job.recollection.epoch):
        return
    job.recollection = replace(job.recollection, epoch=epoch)
    # Once for each world: whoever makes epochs up does not fill the consoles.
    if not told:
        turn.notice(
            f"{who} remembers epoch {epoch}, and the record ends with epoch {job.epoch}: an old copy of it was brought"
            f" back, or {who} was away when it was read back; what was committed in between is not part of the run",
            True,
        )


def hear_epoch(turn: Turn, node: Node, epoch: int) -> bool:
    """Hears in which epoch a node is. Returns whether it is a member that has left the record's world behind.

    That is only noted: if this master has been replaced, it must not act on what came under the next one.
    """
    world = turn.job.world
    if world is None or epoch <= turn.job.epoch or world.member(node.incarnation) is None:
        return False
    turn.live.ahead[node.incarnation] = epoch
    return True


def lose_ahead(turn: Turn) -> bool:
    """Has those members register anew, with what they remember. Returns whether there were any."""
    ahead, turn.live.ahead = turn.live.ahead, {}
    found = [
        (node, f"it is in epoch {epoch}, of which the record knows nothing")
        for incarnation, epoch in ahead.items()
        if (node := turn.job.node_by(incarnation)) is not None
    ]
    membership.lose(turn, found)
    return bool(found)


def restore_settings(turn: Turn, epoch: int, settings: Settings | None, found: list[control_pb2.Checkpoint]) -> None:
    """Puts the job's settings back in force, as of the newest epoch in anybody's memory or in a manifest.

    A manifest has only min and max nodes. An agent that saw the same epoch may know newer ones.
    """
    job = turn.job
    newest = max(found, key=lambda entry: entry.epoch, default=None)
    if newest is not None and newest.epoch > job.recollection.settings_epoch:
        recorded = replace(job.settings, min_nodes=newest.min_nodes, max_nodes=newest.max_nodes)
        put_in_force(turn, newest.epoch, recorded, f"checkpoint {newest.ref.name}")
    if settings is not None and epoch >= job.recollection.settings_epoch:
        put_in_force(turn, epoch, settings, "an agent")


def put_in_force(turn: Turn, epoch: int, settings: Settings, source: str) -> None:
    """Puts settings in force if they make sense together; --nnodes of the master's own command line stands."""
    job = turn.job
    if job.fixed_nnodes:
        settings = replace(settings, min_nodes=job.settings.min_nodes, max_nodes=job.settings.max_nodes)
    if settings.problem:
        turn.notice(f"what {source} remembers of the job's settings does not count: {settings.problem}", True)
        return
    job.settings = settings
    job.recollection = replace(job.recollection, settings_epoch=epoch)


def merge(turn: Turn, found: list[control_pb2.Checkpoint]) -> None:
    """Takes the newest lineage of all checkpoints found so far, no matter who saw which part of it."""
    job = turn.job
    records = {record.digest: record for record in job.checkpoints}
    known = [to_proto(job, record) for record in job.checkpoints]
    new = [entry for entry in found if entry.ref.digest not in records]
    if new:
        # In order of the lineage, no matter who saw which part of it.
        for digest in records:
            job.checkpoints.drop(digest)
        for entry in lineage(known + new):
            job.checkpoints.put(records.get(entry.ref.digest) or from_proto(entry))
    for entry in found:
        if entry.form == control_pb2.FORM_UNIVERSAL:
            checkpoints.record_form(job, entry)
            job.leases = max(job.leases, last_number(entry.ref.name))
