"""What a lost store has forgotten, read back from what agents remember and from the checkpoints that they see."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from dalsegno.protos import control_pb2

from . import checkpoints
from .state import Run, Settings
from .turn import Turn


def run_number(run_id: str) -> int:
    """The number in `run-0001`; 0 for another name."""
    digits = run_id.removeprefix("run-")
    return int(digits) if digits.isdigit() else 0


def remember(
    turn: Turn,
    epoch: int,
    inventory: Iterable[control_pb2.Checkpoint],
    finished_runs: Iterable[str] = (),
    settings: Settings | None = None,
) -> None:
    """No world was opened from this store, but this agent knows of a run: go on above its epoch, from its checkpoints.

    The first such news starts a listening time of one node-timeout, in which everybody's memory is collected.
    `settings` are those in force as the lost store's master told this agent.
    """
    job = turn.job
    over = set(finished_runs)
    known = list(inventory)
    unfinished = [entry for entry in known if entry.run_id not in over and run_number(entry.run_id) >= job.run.number]
    newest = max(
        [job.run.number, *(run_number(entry.run_id) for entry in unfinished), *(run_number(run) + 1 for run in over)]
    )
    if newest > job.run.number:
        # What was read back so far is of a run that is over.
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


def restore_settings(turn: Turn, epoch: int, settings: Settings | None, found: list[control_pb2.Checkpoint]) -> None:
    """Put the job's settings back in force, as of the newest epoch that anybody's memory or a manifest tells of.

    A manifest says min and max nodes only. An agent that saw the same epoch may have heard of them later.
    """
    job = turn.job
    newest = max(found, key=lambda entry: entry.epoch, default=None)
    if newest is not None and newest.epoch > job.recollection.settings_epoch:
        recorded = replace(job.settings, min_nodes=newest.min_nodes, max_nodes=newest.max_nodes)
        put_in_force(turn, newest.epoch, recorded, f"checkpoint {newest.ref.name}")
    if settings is not None and epoch >= job.recollection.settings_epoch:
        put_in_force(turn, epoch, settings, "an agent")


def put_in_force(turn: Turn, epoch: int, settings: Settings, source: str) -> None:
    """Unless they make no sense together; --nnodes of the master's own command line stands."""
    job = turn.job
    if job.fixed_nnodes:
        settings = replace(settings, min_nodes=job.settings.min_nodes, max_nodes=job.settings.max_nodes)
    if settings.problem:
        turn.notice(f"what {source} remembers of the job's settings does not count: {settings.problem}", True)
        return
    job.settings = settings
    job.recollection = replace(job.recollection, settings_epoch=epoch)


def merge(turn: Turn, found: list[control_pb2.Checkpoint]) -> None:
    """The newest lineage of all that was found so far, whoever saw which part of it."""
    job = turn.job
    records = {record.digest: record for record in job.checkpoints}
    known = [checkpoints.to_proto(job, record) for record in job.checkpoints]
    new = [entry for entry in found if entry.ref.digest not in records]
    if new:
        # In order of the lineage, whoever saw which part of it.
        for digest in records:
            job.checkpoints.drop(digest)
        for entry in checkpoints.lineage(known + new):
            job.checkpoints.put(records.get(entry.ref.digest) or checkpoints.from_proto(entry))
    for entry in found:
        if entry.form == control_pb2.FORM_UNIVERSAL:
            checkpoints.record_form(job, entry)
            job.leases = max(job.leases, checkpoints.last_number(entry.ref.name))
