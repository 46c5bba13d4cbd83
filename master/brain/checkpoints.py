"""Which checkpoints count, from which one the run resumes, and which may be deleted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain, groupby

from dalsegno.protos import control_pb2

from . import shapes
from .chronicle import Kind
from .described import from_proto
from .progress import is_further, refilled
from .published import PRUNED_KEPT, Pruned
from .state import Checkpoint, Job, Node
from .turn import Turn, names

# The most damaged forms of one checkpoint that are remembered, and the most late checkpoints that await deletion.
DROPPED_KEPT = 64
WITNESSES = 2
# The most checkpoints that one order deletes.
PRUNED_AT_ONCE = 256
LATE_KEPT = 256


def replaced(job: Job, inventory: Iterable[control_pb2.Checkpoint]) -> frozenset[str]:
    """The resume point's directories that some node sees with another manifest than the recorded one."""
    resume = resume_point(job)
    if resume is None:
        return frozenset()
    recorded = {resume.name: resume.digest, resume.universal_name: resume.universal_digest}
    seen = ((entry.ref.name, entry.ref.digest) for entry in inventory)
    return frozenset(name for name, digest in seen if recorded.get(name, digest) != digest)


def resume_point(job: Job) -> Checkpoint | None:
    """The newest committed checkpoint that is not retired: highest epoch, then highest step."""
    return job.checkpoints.head


def in_memory_alone(job: Job) -> Checkpoint | None:
    """What the run resumes from, if that is not on the disk."""
    head = resume_point(job)
    return head if head is not None and head.parts else None


def same_shape(record: Checkpoint, world_size: int) -> bool:
    """Whether a world of this size loads it as it was saved."""
    return record.any_world_size or record.world_size == world_size


def resharded(job: Job, record: Checkpoint, world_size: int) -> bool:
    """Whether a world of this size loads it by re-sharding: where that works and no universal files come first.

    They come first at the gate. Where nobody asked for them, too: somebody may have made them because it did not work.
    """
    asked = job.settings.universal_checkpoint
    first = job.settings.universal_gate if asked else bool(record.universal_digest)
    return record.reshards and not first and not same_shape(record, world_size)


def loads_now(job: Job, record: Checkpoint, world_size: int) -> bool:
    """Whether a world of this size can load it now, as it is or through an existing conversion."""
    return same_shape(record, world_size) or resharded(job, record, world_size) or bool(record.universal_digest)


def can_load(job: Job, record: Checkpoint, world_size: int) -> bool:
    """Whether a world of this size can load it, perhaps after a conversion."""
    return loads_now(job, record, world_size) or not record.unconvertible


def only_size(job: Job) -> int:
    """How many workers the next world must have, because what the run saves loads in no other; 0: any number."""
    head = job.checkpoints.head
    if head is None or can_load(job, head, 0):
        return 0
    return head.world_size


def cannot_convert(turn: Turn, record: Checkpoint, reason: str) -> None:
    """Notes that it will never have a universal form, nor will later checkpoints of the same script."""
    turn.job.checkpoints.put(replace(record, unconvertible=reason or "no reason given"))


def give_up_resharding(turn: Turn, record: Checkpoint) -> None:
    """Gives up re-sharding a checkpoint, which did not work: it is converted instead."""
    turn.job.checkpoints.put(replace(record, reshards=False))
    turn.notice(
        f"the workers failed before their first step after {record.name} was loaded by another number of ranks: it is"
        " converted instead",
        True,
    )


def record_commit(turn: Turn, message: control_pb2.Checkpoint, by: str) -> str:
    """Records a sealed checkpoint as committed by a node. Returns "" or a reason to refuse it.

    While no other node sees it, it makes no older one retire. What a world began from its ranks may save once more,
    with what was due at that boundary: that counts in its place.
    """
    job = turn.job
    known = job.checkpoint(message.ref.digest)
    if known is not None:
        return ""
    if message.run_id != job.run_id:
        return f"{message.ref.name} belongs to {message.run_id}, and this is {job.run_id}"
    if message.epoch != job.epoch:
        return f"epoch {message.epoch} is closed; {message.ref.name} is not part of the run"
    if message.epoch == job.next.spoilt:
        return f"{message.ref.name} may have begun from damaged memory"
    floor = job.checkpoints.last_step(job.epoch)
    if job.world is not None:
        floor = max(floor, job.world.resumed_step - bool(job.world.resume))
    if message.step <= floor:
        return f"{message.ref.name} is not newer than step {floor}"
    put_commit(turn, replace(from_proto(message), unseen=by))
    return ""


def put_commit(turn: Turn, record: Checkpoint) -> None:
    """Records the newest commit, which is on the disk."""
    put_newer(turn, record)
    turn.open.put_off = False
    turn.live.committed = turn.heard
    retire_in_memory(turn.job)
    retire_old(turn)


def record_written(turn: Turn, record: Checkpoint, by: str, *, candidate: bool = False) -> None:
    """Records what nodes have written to the disk, out of their memory, for the ranks of the last epoch.

    What comes after something newer on the disk does not count, and its files may be deleted. Behind what is newer and
    in memory alone it counts: that may be lost. What comes after its epoch is found when nodes join (`note_late`). Only
    a candidate, which others name, counts all the same.
    """
    job = turn.job
    record = replace(record, parts=0, layout=(), unseen=by)
    of_this = record.epoch == job.epoch
    if of_this and record.step > job.checkpoints.last_step(job.epoch):
        put_commit(turn, record)
    elif candidate or (of_this and ((newest := newest_on_disk(job)) is None or newest.age < record.age)):
        now_on_disk(turn, record, by)
    elif of_this and len(job.late) < LATE_KEPT and record.name not in {one.name for one in job.late}:
        job.late = (*job.late, record)


def now_on_disk(turn: Turn, record: Checkpoint, by: str) -> None:
    """What was in memory alone is a commit like others now, but not the newest one."""
    became = "on the disk"
    if turn.job.checkpoint(record.digest) is None:
        became, record = "committed", as_of_now(turn, record)
    turn.note(Kind.COMMITTED, f"{record.name} is {became}", step=record.step, checkpoint=record.name)
    turn.job.checkpoints.put_in_order(replace(record, parts=0, layout=(), unseen=by))
    fulfil_order(turn, record)
    turn.live.committed = turn.heard
    if turn.job.checkpoints.head is turn.job.checkpoint(record.digest):
        retire_in_memory(turn.job)
    retire_old(turn)


def put_newer(turn: Turn, record: Checkpoint) -> None:
    """Record what is newer than all that is recorded: the run has made progress."""
    record = as_of_now(turn, record)
    turn.job.checkpoints.put(record)
    where = " in memory" if record.parts else ""
    turn.note(Kind.COMMITTED, f"{record.name} is committed{where}", step=record.step, checkpoint=record.name)
    if not record.parts:
        fulfil_order(turn, record)
    turn.open.failure_told = ""
    turn.update_run(ever_stepped=True)
    world = turn.job.world
    if world is not None and record.epoch == world.epoch and not turn.job.phase.has_workers:
        # Its node may have been lost before it could tell of a step: this shows that the world worked.
        shapes.note_worked(turn, world)
    budget = turn.job.run.budget
    if is_further(budget, record.step):
        turn.update_run(budget=refilled(budget, record.step), reopened=0)


def fulfil_order(turn: Turn, record: Checkpoint) -> None:
    """A save that somebody has ordered is on the disk, if it is this one."""
    ordered = turn.job.save_order
    if ordered is not None and record.step > ordered.after:
        turn.job.save_order = None


def newest_on_disk(job: Job) -> Checkpoint | None:
    """The newest checkpoint of the run that is on the disk."""
    return next((one for one in reversed(job.checkpoints.usable) if not one.parts), None)


def as_of_now(turn: Turn, record: Checkpoint) -> Checkpoint:
    """What was the best when it was saved may have been replaced by a better one since, and deleted.

    Between its save and now it was in memory, or on its way to the disk. It takes the best from the one before it, and
    from that one also that its script's checkpoints have no universal form.
    """
    before = turn.job.checkpoints.head
    if before is not None and before.age >= record.age:
        before = next((one for one in reversed(turn.job.checkpoints.usable) if one.age < record.age), None)
    if before is not None and before.unconvertible and before.strategy == record.strategy:
        record = replace(record, unconvertible=before.unconvertible)
    gone = {known.name for known in turn.job.checkpoints.retired} | set(turn.live.run.pruned)
    if record.best in gone:
        record = replace(record, best=before.best if before is not None else "")
    return replace(record, candidate="") if record.candidate in gone else record


def owed(job: Job) -> Checkpoint | None:
    """What the open world has re-sharded, while its universal files are owed; see `beside`."""
    held = job.conversion
    return job.checkpoint(held.source) if held is not None and held.beside else None


def retire_in_memory(job: Job) -> None:
    """There is a newer commit on the disk: nobody need write older memory checkpoints there.

    Except for the best one, and for what universal files are owed of.
    """
    kept = (job.checkpoints.head, owed(job))
    older = [record for record in job.checkpoints.in_memory if not any(record is one for one in kept)]
    best = bests(job.checkpoints.usable) if older else set()
    for record in older:
        if record.name not in best:
            retire(job, record, damaged=False)


def seen(turn: Turn, digests: Iterable[str], node: str) -> None:
    """Notes that a node sees checkpoints. Another node's commit then no longer depends on that node's word alone."""
    confirmed = False
    for digest in digests:
        record = turn.job.checkpoint(digest)
        if record is not None and record.unseen and record.unseen != node:
            turn.job.checkpoints.put(replace(record, unseen=""))
            confirmed = True
    if confirmed:
        retire_old(turn)


def witnesses(job: Job) -> frozenset[str]:
    """The nodes that should look for the newest commit, which only its committer has seen: two, if there are two."""
    head = job.checkpoints.head
    if head is None or not head.unseen or job.world is None:
        return frozenset()
    found: list[str] = []
    for name in chain((member.node for member in job.world.members), job.nodes):
        node = job.nodes.get(name)
        if node is not None and node.sees_directory and name != head.unseen and name not in found:
            found.append(name)
            if len(found) == WITNESSES:
                break
    return frozenset(found)


def record_form(job: Job, message: control_pb2.Checkpoint) -> str:
    """Adds a later form to its checkpoint's record. Returns "" or a reason to refuse it."""
    record = job.checkpoint(message.source.digest)
    if record is None or record.retired:
        return f"{message.ref.name} is a form of a checkpoint that is not part of the run"
    if message.ref.digest in record.dropped:
        return f"{message.ref.name} is damaged"
    if not record.universal_digest:
        job.checkpoints.put(replace(record, universal_name=message.ref.name, universal_digest=message.ref.digest))
        forget_unfinished(job, message.ref.name)
    return ""


def forget_unfinished(job: Job, name: str) -> None:
    """A directory is sealed now. Nodes that saw it while it was being written said that its manifest is missing."""
    for node in list(job.nodes.values()):
        joined = node.joined
        if joined is not None and name in joined.unusable:
            job.nodes.put(node.name, replace(node, joined=replace(joined, unusable=joined.unusable - {name})))


def drop_form(job: Job, record: Checkpoint) -> None:
    """Drops a damaged later form: it is made anew under another name, and this one never counts again."""
    dropped = (*record.dropped, record.universal_digest)[-DROPPED_KEPT:]
    job.checkpoints.put(replace(record, dropped=dropped, universal_name="", universal_digest=""))


def adopt_sealed(turn: Turn, inventory: Iterable[control_pb2.Checkpoint], by: Node, *, taken: bool = False) -> None:
    """Records checkpoints of the last opened epoch that were sealed but could not be committed, and sealed later forms.

    A node of that epoch must report them, if one is left; otherwise any node that sees them. What older epochs sealed
    too late is not part of the run, and may be deleted once the run has a newer commit.

    `taken`: it has just taken what a lost node had not, see `taking`.
    """
    job = turn.job
    forms, late, counts = [], [], list[str]()
    deleted = {record.digest for record in job.late}  # or about to be
    for message in sorted(inventory, key=lambda message: message.step):
        if message.run_id != job.run_id or message.in_memory or message.ref.digest in deleted:
            continue
        if message.form == control_pb2.FORM_UNIVERSAL:
            forms.append(message)
        elif message.epoch == job.epoch and job.epoch and job.checkpoint(message.ref.digest) is None:
            if has_gone_back(job):
                set_aside(job, from_proto(message))
                continue
            if not may_tell(turn, by):
                keep_for_later(turn, message, by)
            elif not record_commit(turn, message, by.name):
                counts.append(message.ref.name)
        elif message.epoch < job.epoch and job.checkpoint(message.ref.digest) is None:
            late.append(message)
    if counts:
        were, them, count = ("was", "it", "it counts") if len(counts) == 1 else ("were", "them", "they count")
        how = f"saved just before a node was lost, and {by.name} has taken {them}" if taken else ""
        turn.notice(f"{names(counts)} {were} {how or 'sealed but not yet recorded'}: {count}")
    note_late(turn, late)
    for message in forms:
        record_form(job, message)


def may_tell(turn: Turn, node: Node) -> bool:
    """Whether a node's report of what the last epoch sealed counts: a node of that epoch, or any if none is left.

    Who leaves, or has not joined in time, is not waited for any more.
    """
    job, world = turn.job, turn.job.world
    if world is None or world.member(node.incarnation) is not None:
        return True
    known = (job.node_by(member.incarnation) for member in world.members)
    late = turn.live.gathering.overdue
    stay = (node for node in known if node is not None and not node.leaving and node.name not in late)
    return not any(turn.presence(node).spoke and turn.is_fresh(node) for node in stay)


def keep_for_later(turn: Turn, message: control_pb2.Checkpoint, by: Node) -> None:
    """A node that had no part in the last epoch tells of what that sealed."""
    told = turn.live.gathering.told_by_strangers
    if message.ref.digest in told or len(told) < LATE_KEPT:
        told.setdefault(message.ref.digest, (message, {}))[1][by.name] = None


def adopt_from_strangers(turn: Turn) -> bool:
    """Records what nodes of the last epoch were to tell of, once none is left. Returns whether there was any."""
    told, nodes, found = turn.live.gathering.told_by_strangers, turn.job.nodes, list[control_pb2.Checkpoint]()
    by_step = sorted(told.values(), key=lambda entry: entry[0].step)
    tellers = ((next((nodes[name] for name in known if name in nodes), None), one) for one, known in by_step)
    for by, entries in groupby(tellers, key=lambda entry: entry[0]):
        if by is None:
            continue
        if not may_tell(turn, by):
            return False  # Nor may others: all are strangers, and this looks at each member.
        found += (of_one := [message for _, message in entries])
        adopt_sealed(turn, of_one, by)
    for message in found:  # Behind all of it: what fails is not taken back here.
        del told[message.ref.digest]
    return bool(found)


def note_late(turn: Turn, late: list[control_pb2.Checkpoint]) -> None:
    """Deletes the files of checkpoints that closed epochs sealed and nobody recorded.

    Only those older than a later commit are deleted: before that, a master that lost its store would read the run back
    from them. The best checkpoint also stays: after a lost store it has no record if the lineage between it and the
    head was pruned.
    """
    job = turn.job
    if not late:
        return
    head, known = resume_point(job), {record.digest for record in job.late}
    # Deletion goes by name, and the run may have recorded another manifest under a name by now.
    spared = bests(job.checkpoints.usable) | {record.name for record in job.checkpoints}
    gone: list[str] = []
    for message in late:
        if message.ref.digest in known or message.ref.name in spared:
            continue
        if head is not None and message.epoch < head.epoch and len(job.late) < LATE_KEPT:
            job.late = (*job.late, from_proto(message))
            gone.append(message.ref.name)
    if gone and head is not None:
        one = len(gone) == 1
        went_on = f"the run, which went on in epoch {head.epoch}: {'it is' if one else 'they are'} deleted"
        turn.notice(f"{names(gone)} {'is' if one else 'are'} no part of {went_on}")


def retire(job: Job, record: Checkpoint, damaged: bool) -> None:
    job.checkpoints.put(replace(record, retired=True, damaged=record.damaged or damaged))


def set_aside(job: Job, record: Checkpoint) -> bool:
    """Takes out of the run what it goes back behind. Returns whether that is on the disk, where it stays."""
    if record.parts:
        retire(job, record, damaged=False)
        return False
    job.checkpoints.put(replace(record, retired=True, aside=True))
    return True


def has_gone_back(job: Job) -> bool:
    """Whether the run went back since the last world opened: what that world sealed does not count any more."""
    return bool(job.run.gone_back) and job.run.gone_back[-1].epoch == job.epoch


def retire_old(turn: Turn) -> None:
    """Beyond the last N, retires what nothing can still choose or use. Recorded before any file is deleted."""
    keep = wanted(turn.job)
    if keep > 0 and len(turn.job.checkpoints) - turn.job.checkpoints.retired_count > keep:
        for record in beyond(turn.job, keep):
            retire(turn.job, record, damaged=False)


def wanted(job: Job) -> int:
    """How many checkpoints stay: as the script wished last, or else as the job's settings say. 0: all."""
    head = job.checkpoints.head
    return job.settings.keep_checkpoints if head is None or head.keep is None else head.keep


def beyond(job: Job, keep: int) -> list[Checkpoint]:
    """What is older than the last `keep`, and neither in use nor the best. The newest come first.

    A checkpoint that only its committer has seen may not exist, so it does not count as one of the last.
    """
    usable = sorted(job.checkpoints.usable, key=lambda record: record.age, reverse=True)
    in_use = in_use_digests(job)
    certain, kept = 0, []
    for record in usable:
        if certain < keep or record.digest in in_use:
            kept.append(record)
        certain += not record.parts and (not record.unseen or not has_witness(job, record.unseen))
    best = bests(kept)
    spared = {record.digest for record in kept}
    return [record for record in usable if record.digest not in spared and record.name not in best]


def has_witness(job: Job, committer: str) -> bool:
    """Whether another node than this one could confirm its commits.

    A run of one node has no such node, and must not fill its disk. It keeps what its world started from, which existed,
    because it was loaded.
    """
    return any(node.sees_directory and node.name != committer for node in job.nodes.values())


def bests(kept: Iterable[Checkpoint]) -> set[str]:
    """Names of what was best as of any checkpoint that stays, or was to be: the run may resume from each of them."""
    return {name for record in kept for name in (record.best, record.candidate) if name}


def in_use_digests(job: Job) -> set[str]:
    """Digests of what a world, a conversion or a verification still reads."""
    used = set()
    if job.world is not None:
        used.add(job.world.resume)
    if job.conversion is not None:
        used.add(job.conversion.source)
    if job.verification is not None:
        used.add(job.verification.digest)
    return used


def prunable(job: Job) -> list[Checkpoint]:
    """Retired checkpoints whose files may be deleted now."""
    newest = resume_point(job)
    in_use = in_use_digests(job)
    gone = [
        record
        for record in job.checkpoints.retired
        if record.digest not in in_use
        and not record.aside
        and (not record.damaged or (newest is not None and newest.age > record.age))
    ]
    return [*job.late, *gone][:PRUNED_AT_ONCE]


def forget_pruned(turn: Turn, digests: set[str]) -> None:
    """The files of these are gone. Their names are remembered for a while: what is in memory may still name them."""
    job = turn.job
    for record in job.checkpoints.retired:
        if record.digest in digests:
            job.checkpoints.drop(record.digest)
            turn.live.run.pruned.append(record.name)
            if not record.parts:
                number = job.pruned[-1].number + 1 if job.pruned else 1
                job.pruned = (*job.pruned, Pruned(number, record.name, record.digest))[-PRUNED_KEPT:]
    if any(record.digest in digests for record in job.late):
        job.late = tuple(record for record in job.late if record.digest not in digests)
