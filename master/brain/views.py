"""What each agent should be doing now: pure functions of the state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from dalsegno.protos import control_pb2

from . import durable, flash, holders, memory, saves, shapes
from .checkpoints import only_size, prunable, resume_point, witnesses
from .described import to_proto
from .holders import Source
from .live import State
from .registration import settings_proto
from .state import Checkpoint, Job, Member, MemberState, Node, Phase, World
from .turn import of_nodes

__all__ = ("PHASES", "Common", "reasons_to_wait", "view")

PHASES = {
    Phase.WAITING: control_pb2.PHASE_WAITING,
    Phase.FORMING: control_pb2.PHASE_FORMING,
    Phase.RUNNING: control_pb2.PHASE_RUNNING,
    Phase.DRAINING: control_pb2.PHASE_DRAINING,
    Phase.SUCCEEDED: control_pb2.PHASE_SUCCEEDED,
    Phase.FAILED: control_pb2.PHASE_FAILED,
    Phase.STOPPED: control_pb2.PHASE_STOPPED,
}

# So many nodes that have a part are named to one that could not reach the first of them.
MOST_TOLD = 16


class Common:
    """What the directives of all nodes have in common at one moment: made once, for any number of nodes.

    `key` tells, without building anything, whether a node's directive would change.
    """

    def __init__(self, state: State) -> None:
        job = state.job
        self.state = state
        self.job = job
        head = resume_point(job)
        self.digest = head.digest if head is not None else ""
        self.witnesses = witnesses(job)
        # The member that seals what a leaver left behind.
        self.last_writer = saves.last_writer(job)
        self.somebody_stays = saves.somebody_stays(job)
        self.to_memory = memory.to_memory(state, self.somebody_stays)
        self.durable = durable.orders(state)
        self.needed = memory.needed(state)
        # Where the parts of the resume point are, for those that gather.
        self.sources = memory.sources_of(state, head) if head is not None and not job.phase.has_workers else ()
        self.flash = flash.agreed(state)
        # Everything below the job is replaced whole: the same objects say the same.
        self.parts = (
            *(job.generation, job.phase, job.epoch, job.run.number, job.settings, head, job.noticed, job.world),
            job.run.shapes,
            *(
                job.conversion,
                job.verification,
                job.drain,
                job.message,
                job.limit,
                state.live.missing.text,
                state.live.gathering.taker,
                self.witnesses,
            ),
            frozenset(record.digest for record in prunable(job)),
            *(job.save_order, job.stopping),
            # What the world began with may come to be on the disk, or get other forms.
            job.checkpoint(job.world.resume) if job.world is not None else None,
            # On who is there depend buddies, and why a node is a spare where the script has failed with more.
            frozenset(known.incarnation for known in job.nodes.values())
            if job.settings.memory_replicas or job.run.shapes.failed
            else frozenset(),
            # Compared by value, so that "not known yet" is a number, too.
            -1 if self.flash is None else self.flash,
            # What a spare is told of the unit depends on how many nodes there are.
            len(job.nodes) if job.settings.node_unit > 1 else 0,
        )
        # The same object in all that say the same.
        self.version = object()
        self._gathered: control_pb2.Gather | None = None
        self._others: tuple[Source, ...] | None = None
        self._others_told: control_pb2.Wait | None = None
        self._template: control_pb2.Directive | None = None
        self._world: control_pb2.World | None = None

    def says_the_same(self, other: Common) -> bool:
        """Whether nothing that all nodes have in common changed between the two moments."""
        if self.job is not other.job or len(self.parts) != len(other.parts):
            return False
        return self.sources == other.sources and all(
            mine is his or (isinstance(mine, int | str | frozenset | tuple) and mine == his)
            for mine, his in zip(self.parts, other.parts, strict=True)
        )

    def after(self, earlier: Common | None) -> Common:
        """This one, with what the one before it has built already if nothing in it has changed."""
        step = self.state.live.held.steps.get(self.digest)
        if step is not None and earlier is not None and step.record.digest == earlier.digest:
            self.sources = holders.steady(self.job, step, earlier.sources, self.sources)
        if earlier is not None and self.says_the_same(earlier):
            self.version, self._template = earlier.version, earlier._template
            self._world, self._gathered = earlier._world, earlier._gathered
        return self

    def key(self, node: Node) -> tuple[object, ...]:
        """A value that is equal if this node's directive is."""
        ending = saves.ending_of(node.incarnation, self.last_writer)
        part, held = self.job.parts.get(node.incarnation), node.name in self.state.live.held_until
        return (
            self.version,
            node,
            part,
            held,
            ending,
            self.somebody_stays,
            self.to_memory,
            node.incarnation in self.needed,
            self.write(node),
            self.more_sources(node),
            self.needs(node),
        )

    def more_sources(self, node: Node) -> tuple[Source, ...]:
        """Where a node finds the parts that could not reach those who are told to all; () for others."""
        head = resume_point(self.job)
        if head is None or not self.sources or not has_looked_in_vain(self.job, node, head.digest):
            return ()
        if self._others is None:
            self._others = memory.sources_of(self.state, head, MOST_TOLD)
        return self._others

    def needs(self, node: Node) -> frozenset[int] | None:
        """Which parts of the resume point a node is to fetch; None: all of them.

        Who could not fetch its parts has no place at present, and goes on with what it was asked for.
        """
        head = resume_point(self.job)
        needed = None if head is None else self.state.live.gathering.needs(node, head.digest)
        if needed is None or head is None or not has_looked_in_vain(self.job, node, head.digest):
            return needed
        assert node.joined is not None
        return needed | (node.joined.parts or frozenset())

    def write(self, node: Node) -> tuple[object, ...]:
        """What a node writes to the disk, and where it finds the parts of that."""
        order = self.durable.get(node.incarnation)
        if order is None:
            return ()
        return order, self.sources_to_write(order)

    def sources_to_write(self, order: durable.WriteOrder) -> tuple[Source, ...]:
        """Where the parts of a step are that one node writes as a whole."""
        return () if order.write or order.seal else memory.sources_of(self.state, order.record)

    @property
    def parts_to_gather(self) -> control_pb2.Gather:
        """Where the parts of the resume point are, if it is in memory."""
        if self._gathered is None:
            self._gathered = control_pb2.Gather(parts=sources_proto(self.sources))
        return self._gathered

    def more_parts(self, node: Node) -> control_pb2.Wait:
        """The same of `more_sources`."""
        sources = self.more_sources(node)
        if not sources:
            return control_pb2.Wait()
        if self._others_told is None:
            self._others_told = control_pb2.Wait(parts=sources_proto(sources))
        return self._others_told

    @property
    def template(self) -> control_pb2.Directive:
        """The part that is the same for all."""
        if self._template is None:
            job = self.job
            self._template = control_pb2.Directive(
                generation=job.generation,
                phase=PHASES[job.phase],
                epoch=job.epoch,
                run_id=job.run_id,
                settings=settings_proto(job.settings),
                notices=[control_pb2.Notice(sequence=n.sequence, text=n.text, warning=n.warning) for n in job.notices],
            )
            if job.save_order is not None:
                self._template.save_order = job.save_order.number
            head = resume_point(job)
            if head is not None:
                self._template.head.CopyFrom(to_proto(job, head))
            source = job.checkpoint(job.conversion.source) if job.conversion is not None else None
            if source is not None:
                self._template.converting = source.name
        return self._template

    def world(self, world: World, node: Node) -> control_pb2.World:
        """A world as one of its members is told of it."""
        if self._world is None:
            self._world = world_proto(self.job, world)
        message = control_pb2.World()
        message.CopyFrom(self._world)
        member = world.by_incarnation[node.incarnation]
        message.place.node, message.place.incarnation = member.node, member.incarnation
        message.place.group_rank, message.place.nproc = member.group_rank, member.nproc
        message.place.first_rank = world.first_ranks[member.group_rank]
        message.place.buddies.extend(memory.buddies(self.job, world.members, member))
        return message


def view(state: State, name: str) -> control_pb2.Directive:
    """The present directive of a registered node."""
    return directive_of(Common(state), state.job.nodes[name])


def directive_of(common: Common, node: Node) -> control_pb2.Directive:
    """The directive of one of many nodes."""
    directive = control_pb2.Directive()
    directive.CopyFrom(common.template)
    order(common, node, directive)
    side_orders(common.job, node, directive)
    if node.leaving:
        directive.leave.stop = common.job.stopping
    head = resume_point(common.job)
    if head is not None and node.name in common.witnesses:
        directive.sight.name, directive.sight.digest = head.name, head.digest
    if common.flash is not None and common.job.world is not None and common.job.world.member(node.incarnation):
        directive.flash_save = common.flash
    if node.incarnation in common.durable:
        order_to_write = common.durable[node.incarnation]
        tell_durable(order_to_write, common.sources_to_write(order_to_write), directive.make_durable)
    return directive


def tell_durable(order: durable.WriteOrder, sources: tuple[Source, ...], told: control_pb2.MakeDurable) -> None:
    """What a node does to bring a memory checkpoint to the disk."""
    told.ref.name, told.ref.digest = order.record.name, order.record.digest
    told.write.extend(order.write)
    told.seal, told.look = order.seal, order.look
    told.parts.extend(sources_proto(sources))


def order(common: Common, node: Node, directive: control_pb2.Directive) -> None:
    """The one thing this node's workers should be doing."""
    job = common.job
    member = job.world.member(node.incarnation) if job.world is not None else None
    if job.phase.is_terminal:
        directive.finish.success = job.phase is Phase.SUCCEEDED
        directive.finish.message = job.message
    elif node.leaving and (member is None or job.part(member) is not MemberState.RUNNING or not job.phase.has_workers):
        if node.incarnation in common.needed:
            directive.wait.reason = f"{node.name} stays until another node has what it alone holds in memory"
        elif saves.is_left_to_others(common.state, member, common.last_writer):
            directive.wait.reason = f"{node.name} stays until the others have completed the save"
        else:
            directive.release.SetInParent()
            tell_where_others_resumed(job, member, directive.release)
    elif member is not None and job.world is not None and job.phase.has_workers:
        if job.phase is Phase.DRAINING or node.leaving:
            directive.drain.epoch = job.epoch
            directive.drain.reason = job.drain.reason if job.drain is not None else ""
            directive.drain.run.CopyFrom(common.world(job.world, node))
            directive.drain.ending = saves.ending_of(node.incarnation, common.last_writer)
            directive.drain.all_leave = not common.somebody_stays
            directive.drain.to_memory = common.to_memory
        else:
            directive.run.CopyFrom(common.world(job.world, node))
    else:
        stand_by_or_gather(common, node, directive)


def tell_where_others_resumed(job: Job, member: Member | None, release: control_pb2.Release) -> None:
    """For a leaver that the open world does without: the newest commit may be that world's own by now."""
    record = job.checkpoint(job.world.resume) if job.world is not None and member is None else None
    if record is not None:
        release.resumed_epoch, release.resumed_step = record.epoch, record.step


@dataclass(frozen=True)
class Standby:
    """What a node outside a running world waits with.

    Attributes:
        reason: Why it has no place, for a person; empty if it is about to get one.
        round: The round that it may join.
        look_for: What it joins again for, when that comes into sight.
        fetches: Whether it is told where the parts of that are.
    """

    reason: str
    round: int = 0
    look_for: Checkpoint | None = None
    fetches: bool = False


def standby(state: State, node: Node, others: Sequence[int] | None = None) -> Standby | None:
    """How a node outside a running world waits; None: it gathers for the next one.

    Args:
        others: `shapes.others_than_suspects`, where many nodes are asked for; None: it is found out if it is needed.
    """
    job, resume = state.job, resume_point(state.job)
    if not node.sees_directory:
        # It joins again if the directory is mounted after all. It does not say why: its own console does.
        what = "does not see the job's checkpoint directory, or may not read what is in it"
        why = f"{node.name} {what}: it stays a spare"
        return Standby(why, job.round, look_for=resume)
    if resume is not None and node.unreadable == resume.digest:
        return Standby(f"{node.name} cannot read {resume.name}, others can: it stays a spare")
    if node.refused:
        return Standby(f"{node.name} cannot take part, and stays a spare: {node.refused}")
    if job.phase.has_workers:
        # Not the next round yet. A Join sent while the world still trains announces the newcomer, but something may be
        # sealed a moment after its inventory was made. The next Gather asks for it again.
        start = job.checkpoint(job.world.resume) if job.world is not None else None
        if start is None or start.parts:
            return Standby(spare_reason(state, node, others), job.epoch)
        # From the start: a Join tells of what it was asked for, not of all that there is.
        blind = node.joined is not None and start.digest not in node.joined.seen
        why = _keeps_looking(node, start) if blind else spare_reason(state, node, others)
        return Standby(why, job.epoch, look_for=start)
    if resume is not None and has_looked_in_vain(job, node, resume.digest):
        return Standby(_keeps_looking(node, resume), job.round, look_for=resume, fetches=True)
    return None


def _keeps_looking(node: Node, record: Checkpoint) -> str:
    return f"{node.name} does not see checkpoint {record.name}: a spare that keeps looking"


def reasons_to_wait(state: State) -> dict[str, str]:
    """Why nodes wait that have no part in a running world, by their names: what they are told, for people and tools."""
    job, world = state.job, state.job.world
    if job.phase.is_terminal:
        return {}
    found: dict[str, str] = {}
    common = Common(state) if any(node.leaving for node in job.nodes.values()) else None
    others = shapes.others_than_suspects(job.run.shapes.failed, job.nodes.values())
    for node in job.nodes.values():
        if node.leaving:
            assert common is not None
            directive = control_pb2.Directive()
            order(common, node, directive)
            found[node.name] = directive.wait.reason
        elif not job.phase.has_workers or world is None or world.member(node.incarnation) is None:
            waits = standby(state, node, others)
            found[node.name] = waits.reason if waits is not None else ""
    return found


def stand_by_or_gather(common: Common, node: Node, directive: control_pb2.Directive) -> None:
    """The order for a node outside a running world."""
    state, job = common.state, common.job
    resume = resume_point(job)
    waits = standby(state, node)
    if waits is not None:
        directive.wait.round, directive.wait.reason = waits.round, waits.reason
        if waits.look_for is not None:
            directive.wait.look_for.name, directive.wait.look_for.digest = waits.look_for.name, waits.look_for.digest
        if waits.fetches:
            tell_parts(common.needs(node), directive.wait, common.more_parts(node))
        return
    directive.gather.round = job.round
    if job.world is not None and node.name == state.live.gathering.taker:
        directive.gather.take.CopyFrom(world_proto(job, job.world))
        directive.gather.take.ClearField("store_host")
        directive.gather.take.ClearField("store_port")
    if job.phase is Phase.WAITING:
        directive.gather.missing = state.live.missing.text
    if resume is not None:
        directive.gather.resume.name, directive.gather.resume.digest = resume.name, resume.digest
        tell_parts(common.needs(node), directive.gather, common.parts_to_gather)


Order = TypeVar("Order", control_pb2.Gather, control_pb2.Wait)


def tell_parts(needed: frozenset[int] | None, order: Order, whole: Order) -> None:
    """Which parts of the resume point a node is to have, if that is in memory, and where they are.

    `whole` tells of all parts, in order. A thousand nodes may be told of a thousand, and one message is copied in a
    fourth of the time that its parts take.
    """
    if needed is None:
        order.MergeFrom(whole)
        return
    order.partly = bool(whole.parts)
    order.parts.extend(whole.parts[part] for part in sorted(needed) if part < len(whole.parts))


def sources_proto(sources: tuple[Source, ...]) -> list[control_pb2.HeldPart]:
    """Where the parts of a memory checkpoint are, as nodes are told."""
    return [
        control_pb2.HeldPart(group_rank=part, addresses=found.addresses, leaves=found.leaves)
        for part, found in enumerate(sources)
    ]


def has_looked_in_vain(job: Job, node: Node, digest: str) -> bool:
    """Whether the node answered this round for this resume point and did not find it."""
    joined = node.joined
    return joined is not None and joined.round == job.round and joined.resume == digest and digest not in joined.seen


def spare_reason(state: State, node: Node, others: Sequence[int] | None = None) -> str:
    """Why a node has no place, for a person; empty if it is about to get one. `others`: see `standby`."""
    if node.name in state.live.held_until:
        seconds = state.job.holds[node.name]
        return f"{node.name} was lost too often lately: it is a spare for {seconds:.0f} s from then on"
    job = state.job
    failed = job.run.shapes.failed
    if failed and job.world is not None:
        free = shapes.others_than_suspects(failed, job.nodes.values()) if others is None else others
        if why := shapes.why_spare(failed, node, job.world.size, free):
            return why
    head = resume_point(job)
    if job.world is not None and len(job.world.members) >= job.most_nodes:
        scaled = "the job was scaled to" if job.limit else "the world has"
        return f"{node.name} is a spare: {scaled} {of_nodes(job.most_nodes)}"
    if head is not None and (only := only_size(job)):
        return (
            f"{node.name} is a spare: what the run saves loads with {only} workers only "
            f"({head.unconvertible}), and the world has them"
        )
    unit = job.settings.node_unit
    if unit > 1 and job.world is not None and len(job.nodes) - len(job.world.members) < unit:
        return f"{node.name} is a spare: worlds have a multiple of {unit} nodes (--node-unit)"
    return ""


def side_orders(job: Job, node: Node, directive: control_pb2.Directive) -> None:
    """Adds what a node does beside its workers."""
    conversion = job.conversion
    if conversion is not None and conversion.lease and conversion.owner == node.name:
        source = job.checkpoint(conversion.source)
        if source is not None:
            directive.convert.lease = conversion.lease
            directive.convert.form = control_pb2.FORM_UNIVERSAL
            directive.convert.beside = job.phase.has_workers
            directive.convert.source.CopyFrom(to_proto(job, source))
            own = f"{source.name}.universal.{conversion.lease}"
            directive.convert.earlier.extend(name for name in conversion.earlier if name != own)
    verification = job.verification
    if verification is not None and verification.verifier == node.name:
        record = job.checkpoint(verification.digest)
        if record is not None:
            directive.verify.number = verification.number
            form = control_pb2.FORM_UNIVERSAL if verification.universal else control_pb2.FORM_SHARDED
            directive.verify.form = form
            directive.verify.ref.name = record.universal_name if verification.universal else record.name
            directive.verify.ref.digest = record.universal_digest if verification.universal else record.digest
    if job.phase is Phase.RUNNING and job.world is not None:
        member = job.world.member(node.incarnation)
        if member is not None and member.group_rank == 0:
            for record in prunable(job):
                directive.prune.add(name=record.name, digest=record.digest)


def world_proto(job: Job, world: World) -> control_pb2.World:
    """What all members are told of a world."""
    message = control_pb2.World(
        epoch=world.epoch,
        run_id=job.run_id,
        store_host=world.store_host,
        store_port=world.store_port,
        nodes=len(world.members),
        world_size=world.size,
        arrived=world.arrived,
    )
    record = job.checkpoint(world.resume) if world.resume else None
    if record is not None:
        message.resume.source.CopyFrom(to_proto(job, record))
        message.resume.form = control_pb2.FORM_UNIVERSAL if world.universal else control_pb2.FORM_SHARDED
        if world.universal:
            message.resume.universal.name = record.universal_name
            message.resume.universal.digest = record.universal_digest
    return message
