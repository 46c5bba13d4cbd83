"""Carries out the actions of the agent's decisions, except those about workers.

Shared by the elastic agent of `dlrover-run` and by the rendezvous handler for plain torchrun; both feed the same
decisions from the same mailbox.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from dalsegno.protos import control_pb2
from dalsegno.protos.processes import own_process
from dalsegno.protos.shortage import shortage, why_not_started
from dalsegno.protos.trace import mark

from ..control.connection import Connector
from ..control.link_cause import LinkCause
from ..control.master_checks import problem_of, problem_of_reply
from ..control.master_client import ClientCallbacks, MasterClient, OutboxFull
from ..decisions import events as ev
from ..memory.durable import NothingThere, PartlyWritten
from ..memory.tier import HeldParts
from ..processes.lifeline import Lifeline
from ..storage.errand import reason_of
from ..storage.job_directory import JobDirectory, Storage, Survey
from ..storage.room import RoomWatch, give_back_spares
from ..workers.conversion_job import ConversionJob
from ..workers.own_address import elsewhere, first_address, node_variables, watch_address
from ..workers.tcp_stores import StoreServers
from .config import AgentConfig, differences
from .mailbox import Mailbox
from .own_memory import OwnMemory

__all__ = ["Effects"]

# What to do about a master whose messages make no sense.
_CHECK = "check that a dlrover-master of this version is at that address"

logger = logging.getLogger(__name__)


class Effects:
    """Carries out one agent's actions.

    Args:
        config: the agent's configuration.
        directory: the job's directory.
        connector: the way to the master.
        masters: the addresses known at first; the route to them decides under which address others reach this node.
        lifeline: the node's lifeline.
        mailbox: where events go.
        say: prints one line for people.
        seen_generation: the generation in a claim, if there was one.
    """

    def __init__(
        self,
        config: AgentConfig,
        directory: JobDirectory,
        connector: Connector,
        masters: Sequence[str],
        lifeline: Lifeline,
        mailbox: Mailbox[ev.Event],
        say: Callable[[str, bool], None],
        seen_generation: int = 0,
    ) -> None:
        self._config = config
        self._mailbox = mailbox
        self.say = say
        self._directory = directory
        self.run_id = ""
        # The settings in force: the job's, once the master has answered.
        self.settings = config.settings
        self._told: control_pb2.Settings | None = None
        self._disagreement = self._passed_over = ""
        self._incarnation = ""
        self._epoch = 0
        # How many Joins were to be prepared.
        self._joins = 0
        # The newest commit that the master has told.
        self._head: control_pb2.Checkpoint | None = None
        way = tuple(masters), config.local_addr, config.settings.max_nodes > 1
        self._address = first_address(*way, config.connect_timeout, say, config.settings.min_nodes > 1)
        self._connector = connector
        self.stores = StoreServers(self._address)
        self.storage = Storage(directory)
        # Takes over what the script saved last in a world whose first node is gone; blocks.
        self.take: Callable[[control_pb2.World], None] = lambda world: None
        self.room = RoomWatch(
            2 if config.adopts else 1, self.storage.deletion, lambda missing: mailbox.put(ev.RoomMissing(missing))
        )
        self._own_memory = OwnMemory(
            config,
            connector.token,
            lifeline,
            self._held_changed,
            lambda text, warning: mailbox.put(ev.Remark(text, warning)),
        )
        self.memory = self._own_memory.at_start(self.stores.address)
        # Whether the master can record, as told last: every answer to a sign of life says it.
        self._records = True
        # What this agent said as it registered last.
        self._registration = control_pb2.RegisterRequest()
        self.conversion = ConversionJob(lifeline, config.log_dir / "conversion.log", self._converting)
        self._cause = LinkCause(connector.hopeless, lambda cause: say(cause, True))
        self.client = MasterClient(
            connector,
            config.job_id,
            ClientCallbacks(
                registered=self._registered,
                refused=lambda code, detail: mailbox.put(ev.Refused(code, detail)),
                directed=self._directed,
                failed=lambda method, code, detail: mailbox.put(ev.CallFailed(method, code, detail)),
                link=self._link_changed,
                postponed=lambda detail: mailbox.put(ev.Postponed(detail)),
                replication=lambda *said: mailbox.put(ev.Replication(*said)),
                records=self._recording,
                broken=lambda detail: mailbox.put(ev.Broken(detail)),
            ),
        )
        self.client.saw_generation(seen_generation)
        self._address_watch = watch_address(*way, self._address, lambda *both: mailbox.put(ev.AddressChanged(*both)))

    def perform(self, action: ev.Action) -> bool:
        """Carries out one action. False: it is about workers, or the exit, which the caller handles."""
        match action:
            case ev.Register():
                self._register(action.previous_incarnation, action.node)
            case ev.Call():
                self._call(action)
            case ev.PrepareJoin():
                self._prepare_join(action)
            case ev.ReadManifest():
                self.storage.read_manifest(self.run_id, action.name, action.digest, self._mailbox.put)
            case ev.StartConversion():
                self._start_conversion(action.conversion)
            case ev.StopConversion():
                self.conversion.stop(action.lease)
            case ev.Verify():
                self.storage.verify(self.run_id, action.verification, self._verifying)
            case ev.Look():
                self.storage.sight(self.run_id, action.ref, self._mailbox.put)
            case ev.HoldPart():
                if self.memory is not None:
                    self.memory.sealed(self.run_id, action.name, action.digest, action.urgent)
            case ev.SendPart():
                if self.memory is not None:
                    self.memory.send(self.run_id, action.name, action.digest)
            case ev.Doubt():
                self._doubt(action.ref)
            case ev.MakeDurable():
                self._make_durable(action)
            case ev.StopWriting():
                if self.memory is not None:
                    self.memory.stop_writing(action.ref)
            case ev.KeepInMemory():
                if self.memory is not None:
                    self.memory.keep(self.run_id, action.epoch, action.digests)
            case ev.Prune():
                self.storage.prune(self.run_id, action.refs, self._mailbox.put)
            case ev.WriteLatest():
                self.storage.write_latest(self.run_id, action.head)
            case ev.Sweep():
                self.storage.sweep(self.run_id, action.epoch, action.step, action.converting)
            case ev.MarkFinished():
                self._mark_finished(action.run_id or self.run_id)
            case ev.MoveTo():
                self._move_to(action.address)
            case ev.Say():
                self.say(action.text, action.warning)
            case _:
                return False
        return True

    def _call(self, action: ev.Call) -> None:
        try:
            self.client.call(action.method, action.request)
        except OutboxFull as error:
            self._mailbox.put(ev.Broken(str(error)))

    def run_dir(self) -> Path:
        """The present run's directory."""
        return self._directory.run(self.run_id)

    def node_variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """What this node's ranks are told of its network, beside what `environment` has."""
        return node_variables(self._address, environment)

    def _move_to(self, address: str) -> None:
        self._address = self.stores.address = address
        if self.memory is not None:
            self.memory.listen(address)
        # Its connection is dead, which it would find out by itself, but seconds later.
        self._connector.failed(self._connector.present)

    def open_memory(self, world: control_pb2.World) -> None:
        """Parts of older epochs are refused from now on, and own ones go to this world's buddies."""
        if self.memory is not None:
            place = world.place
            self.memory.open_epoch(world.run_id, world.epoch, place.group_rank, tuple(place.buddies))

    def close(self, last_calls: float) -> None:
        """Waits at most `last_calls` seconds for unanswered calls, then ends everything."""
        # Without a run no master has answered yet: what waits is the registration, which nobody needs any more.
        if self.run_id and not self.client.flush(last_calls):
            logger.warning("%d calls were not answered before the agent ended", self.client.waiting())
        self._address_watch.close()
        self.conversion.stop()
        self.room.close()
        self.storage.close()
        if self.storage.keeps_spares:
            give_back_spares(self._directory.run(self.run_id))
        if self.memory is not None:
            self.memory.close()
        self.client.close()
        self._cause.close()
        self.stores.close()

    def _link_changed(self, up: bool, refused: bool) -> None:
        self._mailbox.put(ev.LinkChanged(up, refused))
        if self._connector.explains:
            self._cause.changed(up, refused)

    def _recording(self, records: bool) -> None:
        if records != self._records:
            self._records = records
            self._mailbox.put(ev.RecordingChanged(records))

    # ---- registration -----------------------------------------------------------------------------------------------

    def _register(self, previous: str, node: str) -> None:
        # Now, not after the survey: calls made in between belong to the new incarnation.
        self.client.new_session()
        incarnation = secrets.token_hex(8)

        back = None if previous else self._config.resume_step

        def register(survey: Survey) -> None:
            self._registration = control_pb2.RegisterRequest(
                incarnation=incarnation,
                host=socket.gethostname(),
                node=node,
                nproc=self._config.nproc,
                settings=self._config.settings,
                probe=survey.probe,
                inventory=survey.inventory,
                epoch=self._epoch,
                finished_runs=survey.finished_runs,
                new_run=self._config.new_run and not previous,
                previous_incarnation=previous,
                known_settings=self._told,
                expects_session=self._config.expects_session,
                dlrover=self._config.dlrover,
                adopts=self._config.adopts,
                process=control_pb2.Process(**dataclasses.asdict(own_process())),
                peer_address=self.memory.address if self.memory is not None else "",
                resume_step=None if back is None else back[0],
                resume_time=0 if back is None else back[1],
            )
            if not previous:
                self._mailbox.put(ev.Asked())
            self.client.register(self._registration)

        def ready(survey: Survey) -> None:
            try:
                register(survey)
            except Exception as error:  # whatever it is: it says nothing about the directory, and nobody waits for it
                logger.exception("this node cannot register")
                self._mailbox.put(ev.Broken(f"this node cannot register: {reason_of(error)}"))

        def unreadable(reason: str) -> None:
            if previous:
                # The directory could be read before, so this node may come back as a spare.
                ready(Survey("", (), ()))
            else:
                self._mailbox.put(ev.Refused("STORAGE", reason))

        self.storage.survey(ready, unreadable, not previous, lambda why: self._mailbox.put(ev.LooksAgain(why)))

    def _registered(self, incarnation: str, reply: control_pb2.RegisterReply) -> None:
        if problem := problem_of_reply(reply):
            self._mailbox.put(ev.Refused("NONSENSE", f"what answers as the master makes no sense: {problem}; {_CHECK}"))
            return
        if reply.HasField("settings") and self._takes_part(reply.settings):
            return
        if not self._incarnation and self._config.announcement:
            self.say(self._config.announcement, False)
        if not self._incarnation and (line := elsewhere(self._address, os.environ)):
            self._mailbox.put(ev.Remark(line))
        self._incarnation = incarnation
        self.run_id = reply.run_id or self.run_id
        if reply.HasField("settings"):
            self._in_force(reply.settings)
        self._mailbox.put(ev.Registered(incarnation, reply))

    def _in_force(self, settings: control_pb2.Settings) -> None:
        """Takes the job's settings from the master. People are told once how this node's own flags differ."""
        self.settings = self._told = settings
        if settings.max_nodes > 1:
            self._address_watch.expect_others()
        disagreement = differences(self._config.settings, settings)
        if disagreement and disagreement != self._disagreement:
            self._disagreement = disagreement
            self._mailbox.put(ev.Remark(disagreement))

    def _directed(self, directive: control_pb2.Directive) -> None:
        problem = problem_of(directive, self._incarnation, self._config.nproc)
        if problem:
            if problem != self._passed_over:
                what = f"an order of the master makes no sense and is passed over: {problem}; {_CHECK}"
                self._mailbox.put(ev.Remark(what))
            self._passed_over = problem
            return
        self.run_id = directive.run_id or self.run_id
        self._epoch = max(self._epoch, directive.epoch)
        if directive.HasField("settings") and directive.settings != self._told:
            self._in_force(directive.settings)
            if self._takes_part(directive.settings):
                return  # The master repeats its order when it has heard of it.
        self._head = directive.head if directive.HasField("head") else None
        if self._config.make_room and self._head is not None and not self._head.in_memory:
            self.room.committed(self._directory.run(self.run_id), self._head)
        self._mailbox.put(ev.Directed(directive))

    def _mark_finished(self, run_id: str) -> None:
        head = self._head
        self.storage.mark_finished(run_id, head.step if head else 0, head.ref if head else None)

    # ---- joining ----------------------------------------------------------------------------------------------------

    def _prepare_join(self, action: ev.PrepareJoin) -> None:
        self._joins += 1
        number = self._joins
        if action.take is None:
            self._open_and_look(action, number)
            return

        def take(world: control_pb2.World) -> None:
            try:
                self.take(world)
            except Exception:
                # This node joins all the same.
                logger.exception("what the script saved last in epoch %d is not taken", world.epoch)
            self._open_and_look(action, number)

        # On a thread, because it may copy a large checkpoint.
        try:
            threading.Thread(target=take, args=(action.take,), name="take", daemon=True).start()
        except RuntimeError as error:
            why = shortage(error) or str(error)
            self._mailbox.put(ev.JoinFailed(action.round, _digest(action.resume), why, action.some))

    def _open_and_look(self, action: ev.PrepareJoin, number: int) -> None:
        """`number`: of this Join. What it has waited for may end when the next one is prepared already."""
        digest, took = _digest(action.resume), action.take.epoch if action.take is not None else 0
        try:
            # A master that has lost its record counts rounds anew.
            host, port = self.stores.open((self.client.generation, action.round))
        except (OSError, RuntimeError) as error:
            # torch's store raises RuntimeError for a port that it cannot have.
            why = shortage(error)
            reason = f"no store can be served at {self.stores.address} ({error}); check --local-addr"
            reason = f"no store can be served here, tried again: {why}" if why else reason
            self._mailbox.put(ev.JoinFailed(action.round, digest, reason, action.some))
            return

        def seen(survey: Survey, *fetched: control_pb2.Checkpoint, lacks: bool = False) -> None:
            inventory = (*survey.inventory, *fetched)
            unusable = survey.unusable
            self._mailbox.put(
                ev.JoinPrepared(
                    action.round, digest, host, port, survey.probe, inventory, unusable, lacks, took, action.some
                )
            )

        def failed(why: str) -> None:
            # People have heard why, once. An empty Join in its place would be taken for another directory.
            reason = "this node cannot look at the checkpoint directory: tried again"
            self._mailbox.put(ev.JoinFailed(action.round, digest, reason, action.some))

        newest = (self._head.epoch, self._head.step) if self._head is not None else None
        look = partial(self.storage.look, self.run_id, newer_than=newest, turn=number, failed=failed)
        if not action.parts or action.resume is None:
            look(action.resume, action.patient, seen)
            return
        if self.memory is None:
            # The others are not to wait for what cannot come here before it is on the disk.
            look(None, False, lambda survey: seen(survey, lacks=True))
            return

        def fetched(found: control_pb2.Checkpoint | str) -> None:
            if isinstance(found, str) and action.anyway:
                look(None, False, lambda survey: seen(survey, lacks=True))
            elif isinstance(found, str):
                assert action.resume is not None
                reason = f"{action.resume.name} is not here yet: {found}"
                self._mailbox.put(ev.JoinFailed(action.round, digest, reason, action.some))
            else:
                look(None, False, lambda survey: seen(survey, found))

        self.memory.gather(self.run_id, action.resume, action.parts, fetched, partly=action.some is not None)

    # ---- memory checkpoints -----------------------------------------------------------------------------------------

    def _takes_part(self, settings: control_pb2.Settings) -> bool:
        """Makes a memory tier if the job wants one and this agent's own command line did not; the master is told.

        False: nothing has changed. Otherwise the answer to this registration comes in the present one's place.
        """
        if settings.memory_replicas <= 0 or self.memory is not None:
            return False
        memory = self._own_memory.make(self.stores.address)
        if memory is None:
            return False
        self.memory = memory
        self._registration.peer_address = memory.address
        self._registration.known_settings.CopyFrom(settings)
        self.client.register(self._registration)
        return True

    def _held_changed(self, held: HeldParts) -> None:
        if held.run_id == self.run_id:
            self._mailbox.put(ev.HeldChanged(held.checkpoint, held.parts, len(held.copies), held.unsent, held.damaged))

    def _doubt(self, ref: control_pb2.CheckpointRef) -> None:
        def done(found: str) -> None:
            self._mailbox.put(ev.Doubted(ref, found))

        if self.memory is None:
            done("")
        else:
            self.memory.doubt(self.run_id, ref, done)

    def _make_durable(self, action: ev.MakeDurable) -> None:
        memory, ref, run_id, run_dir = self.memory, action.ref, self.run_id, self.run_dir()

        def done(failure: str) -> None:
            written = failure.parts if isinstance(failure, PartlyWritten) else ()
            absent = isinstance(failure, NothingThere)
            self._mailbox.put(ev.MadeDurable(ref, failure, action.write, written, absent))

        if memory is None:
            done("this node has no memory checkpoints")
            return
        if action.look:
            memory.look_for(run_id, ref, run_dir, done)
            return
        if action.write or action.seal:
            memory.write_parts(run_id, ref, run_dir, action.write, done)
            return
        if not action.parts:
            # Nobody has said where the rest is: what is here is written, and others may have written that.
            memory.make_durable(run_id, ref, run_dir, done)
            return

        def fetched(found: control_pb2.Checkpoint | str) -> None:
            if isinstance(found, str):
                done(found)
            else:
                memory.make_durable(run_id, ref, run_dir, done)

        memory.gather(run_id, ref, action.parts, fetched)

    # ---- conversion -------------------------------------------------------------------------------------------------

    def _converting(self, update: ev.ConversionUpdate) -> None:
        working = update.state == control_pb2.CONVERSION_STATE_WORKING
        if update.state == control_pb2.CONVERSION_STATE_READY:
            mark("converted", run=self.run_id, epoch=self._epoch)
        self._mailbox.put(update, replaces=("conversion", update.lease) if working else None)

    def _verifying(self, update: ev.VerificationMoved | ev.VerificationDone) -> None:
        working = isinstance(update, ev.VerificationMoved)
        self._mailbox.put(update, replaces=("verification", update.number) if working else None)

    def _start_conversion(self, conversion: control_pb2.Conversion) -> None:
        try:
            self.conversion.start(self.run_dir(), conversion)
        except (OSError, ValueError) as error:
            text = why_not_started("the converter", error)
            self._mailbox.put(
                ev.ConversionUpdate(
                    conversion.lease,
                    control_pb2.CONVERSION_STATE_ENVIRONMENT,
                    message=text,
                )
            )


def _digest(ref: control_pb2.CheckpointRef | None) -> str:
    return ref.digest if ref is not None else ""
