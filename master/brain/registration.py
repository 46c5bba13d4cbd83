"""Registration: names, settings, the first agent, and a run that starts over."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import replace
from operator import attrgetter

from dalsegno.protos import control_pb2
from dalsegno.protos.peer_address import speaks_tls
from dalsegno.protos.processes import Process, is_of_earlier_boot

from . import beside, going_back, liveness, membership, running
from .chronicle import Kind
from .door import MOST_NODES
from .events import Reply
from .live import ConversionLife
from .presences import Presence
from .recollection import note_newer, number_of, remember
from .state import Budget, Job, NextWorld, Node, Phase, Recollection, Run, Settings
from .stopped import where
from .turn import Turn, heartbeat_of, of_nodes, pace_of

_FIELDS = tuple(Settings.__dataclass_fields__)

# Seconds after its last word in which a registered agent without a stream counts as there.
OPENING_SECONDS = 2.0


def settings_from(message: control_pb2.Settings) -> Settings:
    """The settings that an agent sent."""
    return Settings(**{name: getattr(message, name) for name in _FIELDS})


def settings_proto(settings: Settings) -> control_pb2.Settings:
    """The settings as agents are told them."""
    return control_pb2.Settings(**{name: getattr(settings, name) for name in _FIELDS})


def register(turn: Turn, message: control_pb2.RegisterRequest) -> Reply:
    """Admits an agent under a name that no live node holds.

    Repeating with the same incarnation changes nothing, but for memory that the agent has made since.
    """
    job = turn.job
    if message.job_id != job.job_id:
        return Reply("INVALID_ARGUMENT", f"this master runs job {job.job_id!r}, not {message.job_id!r}: check --job-id")
    wrong = settings_from(message.settings).problem or misfit(turn, message)
    if wrong:
        return Reply("INVALID_ARGUMENT", wrong)
    known = job.node_by(message.incarnation)
    # Even a refused agent proves that the master can be heard.
    new = known is None and not message.previous_incarnation
    left = new and job.settings.max_nodes == 1 and liveness.have_closed(turn)
    turn.live.clock.word(turn.now, job.settings.node_timeout, heartbeat_of(job), left=left)
    turn.heard = turn.live.clock.at(turn.now)
    if known is not None:
        if not proves(known, message.secret):
            return Reply("FAILED_PRECONDITION", f"incarnation {message.incarnation!r} is another agent's")
        membership.hear(turn, known)
        return tell_memory(turn, message, known) or accepted(turn, known)
    if (why := turn.live.shut_out.get(message.previous_incarnation)) is not None:
        return Reply("PERMISSION_DENIED", f"this node was fenced for good ({why}): a new start of it is let in")
    if job.stopping:
        return Reply("UNAVAILABLE", "the job is being stopped by order: nobody is let in")
    if (at_once := going_back.refused(job, message)) is not None:
        return at_once
    if (too_early := ends_if_left(turn, message)) is not None:
        return too_early
    if wrong := misfit(turn, message):
        return Reply("INVALID_ARGUMENT", wrong)  # the job has ended just now
    remark = new_run_without_effect(turn, message) or reopen(turn, message)
    if isinstance(remark, Reply):
        return remark
    if message.previous_incarnation:
        before = job.node_by(message.previous_incarnation)
        if before is not None and proves(before, message.secret):
            membership.lose(turn, [(before, "it started anew")])
    free_earlier_boots(turn, message.process)
    refused = speaks_otherwise(turn, message) or name_taken(turn, message)
    if refused is not None:
        return refused
    if len(job.nodes) >= MOST_NODES:
        return Reply("RESOURCE_EXHAUSTED", f"{len(job.nodes)} nodes are registered, which is all that a job may have")
    first_agent(turn, message)
    gone_back = going_back.go_back(turn, message, lambda name: is_there(turn, name))
    if isinstance(gone_back, Reply):
        return gone_back
    return accepted(turn, admit(turn, message, "; ".join(filter(None, (remark, gone_back)))))


def digest_of(secret: bytes) -> str:
    """The digest that is kept of a secret."""
    return hashlib.sha256(secret).hexdigest() if secret else ""


def proves(node: Node, secret: bytes) -> bool:
    """Whether this is the secret with which the node's agent registered."""
    return not node.secret or hmac.compare_digest(node.secret, digest_of(secret))


def accepted(turn: Turn, node: Node) -> Reply:
    """The reply that admits a node."""
    job = turn.job
    return Reply(
        message=control_pb2.RegisterReply(
            generation=job.generation,
            node=node.name,
            settings=settings_proto(job.settings),
            run_id=job.run_id,
            remark=node.remark,
            pace=pace_of(turn),
        )
    )


def admit(turn: Turn, message: control_pb2.RegisterRequest, remark: str) -> Node:
    """A new node, with a name of its own."""
    job, live = turn.job, turn.live
    job.arrivals += 1
    node = Node(
        name=message.node or free_name(job, message.host),
        incarnation=message.incarnation,
        host=message.host,
        nproc=message.nproc,
        order=job.arrivals,
        secret=digest_of(message.secret),
        sees_directory=sees(job, message.probe),
        probe=message.probe,
        remark=remark,
        expects_session=message.expects_session,
        dlrover=message.dlrover,
        adopts=message.adopts,
        process=process_of(message),
        peer_address=message.peer_address,
    )
    job.nodes.put(node.name, node)
    live.nodes.add(node.name, Presence(turn.heard))
    membership.hear(turn, node)
    if not live.gathering.is_crash_looping(node.name, turn.now):
        live.last_arrival = turn.now
    turn.note(Kind.REGISTERED, f"{node.name} has come, on {node.host}", nodes=(node.name,))
    return node


def sees(job: Job, probe: str) -> bool:
    """Whether a node that reads this probe reads the job's directory. Who has read none has seen nothing."""
    return bool(probe) and probe == job.probe


def free_name(job: Job, host: str) -> str:
    """The host name plus the lowest number that no live node of that host holds."""
    number = 0
    while f"{host}-{number}" in job.nodes:
        number += 1
    return f"{host}-{number}"


def name_taken(turn: Turn, message: control_pb2.RegisterRequest) -> Reply | None:
    """A refusal if the name is taken: it belongs to its node until the stream is closed or silent past the timeout."""
    job = turn.job
    holder = job.nodes.get(message.node) if message.node else None
    if holder is None:
        return None
    if not turn.presence(holder).spoke and is_there(turn, holder.name):
        # A restarted master only presumes it alive: after a power cut it is the same node, started anew.
        return Reply("ABORTED", f"node name {message.node!r} was held when the master stopped: waiting for its node")
    if is_there(turn, holder.name):
        return Reply(
            "ALREADY_EXISTS",
            f"node name {message.node!r} is held by a live node on {holder.host}: choose another --node-name",
        )
    membership.lose(turn, [(holder, "a new agent took its name")])
    return None


def speaks_otherwise(turn: Turn, message: control_pb2.RegisterRequest) -> Reply | None:
    """A refusal if the others speak TLS with each other, and this agent does not, or the other way round.

    What the one held no other could fetch, and a world would wait for it in vain.
    """
    if not message.peer_address:
        return None
    heard = (node for node in turn.job.nodes.values() if node.peer_address and turn.presence(node).spoke)
    other = next((node for node in heard if is_there(turn, node.name)), None)
    if other is None:
        return None
    theirs, own = speaks_tls(other.peer_address), speaks_tls(message.peer_address)
    if theirs == own:
        return None
    return Reply(
        "INVALID_ARGUMENT",
        f"agents hold each other's memory checkpoints, and {other.name} {'speaks' if theirs else 'does not speak'} TLS"
        f" with others, this one {'does' if own else 'does not'}: give --tls-ca to all agents or to none, and the same"
        " version of dalsegno",
    )


def tell_memory(turn: Turn, message: control_pb2.RegisterRequest, node: Node) -> Reply | None:
    """Notes where an agent's memory is that it has made as it heard of the job's settings; or a refusal of that."""
    if node.peer_address or not message.peer_address:
        return None
    refused = speaks_otherwise(turn, message)
    if refused is None:
        turn.update(node, peer_address=message.peer_address)
    return refused


def process_of(message: control_pb2.RegisterRequest) -> Process | None:
    """The agent's process, as the agent describes it; None from an older agent."""
    said = message.process
    if not message.HasField("process"):
        return None
    return Process(said.machine, said.boot_id, said.pid_ns, said.pid, said.start_time)


def free_earlier_boots(turn: Turn, here: control_pb2.Process) -> None:
    """Removes nodes of earlier boots of a machine: an agent of the present boot proves that they are gone.

    Only an agent of that machine can prove it, because no other knows what identifies the machine. A node that was
    heard just now is there, whatever somebody says about its machine.
    """
    lately = turn.heard - 3 * heartbeat_of(turn.job)
    gone = []
    for node in turn.job.nodes.on_machine(here.machine):
        presence = turn.presence(node)
        unheard = not presence.spoke or presence.heard < lately
        if unheard and node.process is not None and is_of_earlier_boot(node.process, here):
            gone.append((node, "its machine was started anew"))
    membership.lose(turn, gone)


def ends_if_left(turn: Turn, message: control_pb2.RegisterRequest) -> Reply | None:
    """Ends a failed job if those are gone that were to bring what they had to the disk first: a new agent has come.

    Returns a refusal while that is not known, because the master is new: it would be told that the job has failed.
    """
    under_way = turn.job.ending
    if under_way is None or message.previous_incarnation:
        return None  # an agent that registers anew may bring something itself
    there = [node for node in turn.job.nodes.values() if is_there(turn, node.name)]
    if not there:
        running.end(turn, Phase.FAILED, under_way.message, notice=under_way.notice)
    elif not any(turn.presence(node).spoke for node in there):
        return Reply(
            "UNAVAILABLE", f"the job is ending, and {of_nodes(len(there))} of it may still be there: try again"
        )
    return None


def new_run_without_effect(turn: Turn, message: control_pb2.RegisterRequest) -> str:
    """What to tell a new agent that asks for a new run while the last one is not over; "" if it knows."""
    job = turn.job
    if not message.new_run or job.phase.is_terminal or message.previous_incarnation:
        return ""
    if job.world is None and not len(job.checkpoints):
        return ""  # nothing was begun
    if job.run.begun_anew and any(is_there(turn, name) for name in job.nodes):
        return ""  # the same command on another node has begun this run a moment ago
    return (
        f"--new-run has no effect: {job.run_id} is not over, and goes on from {where(job)};"
        " to start over, use another --job-id"
    )


def reopen(turn: Turn, message: control_pb2.RegisterRequest) -> Reply | str:
    """Handles a new agent of an ended job: a run that succeeded, or was stopped under a master of its own, stays ended.

    A failed one resumes, or the next one starts.

    Returns a refusal, or what the agent should tell its user.
    """
    job = turn.job
    if not job.phase.is_terminal or message.previous_incarnation:
        return ""  # an agent of the ended run is told how it ended, even if it was away then
    stays_stopped = job.phase is Phase.STOPPED and not job.embedded
    if stays_stopped or (job.phase is Phase.SUCCEEDED and not message.new_run):
        # Supervisors may send one after the other, and an ended job declares nobody dead.
        for node in [node for node in job.nodes.values() if not is_there(turn, node.name)]:
            membership.drop(turn, node)
    if job.phase is Phase.SUCCEEDED and not message.new_run:
        # It is let in, and its first directive says how the job ended.
        return f"{job.run_id} is finished: nothing is left to do; --new-run trains again, from step 0"
    if stays_stopped:
        # A supervisor may have started this agent, with --new-run, too; a person who wants to go on says so.
        return job.message
    if any(is_there(turn, name) for name in job.nodes):
        return Reply("UNAVAILABLE", "the agents of the run that has ended are still leaving")
    message_then, failed = job.message, job.phase is Phase.FAILED
    take_up_again(turn)
    if failed:
        job.limit = 0
    if message.new_run:
        begin_anew(turn, message)
        return ""
    who = message.node or free_name(job, message.host)  # as it is going to be admitted
    if not failed:
        text = f"{job.run_id} was stopped: {who} takes it up again from {where(job)}"
        turn.notice(text, kind=Kind.RESUMED)
        return text
    # A supervisor may start agents again and again, so each time says how often it was in vain so far.
    turn.update_run(reopened=job.run.reopened + 1)
    times = f", for the {ordinal(job.run.reopened)} time without a commit" if job.run.reopened > 1 else ""
    text = f"{job.run_id} had failed ({message_then}): {who} takes it up again from {where(job)}{times}"
    turn.notice(text, True, Kind.RESUMED)
    return text


def take_up_again(turn: Turn) -> None:
    """Makes an ended job wait for nodes again; what its run has committed stays."""
    job = turn.job
    for node in list(job.nodes.values()):
        membership.drop(turn, node)
    unheard = job.world is not None
    job.opened = None
    job.next = NextWorld(quiet=True, conversion=beside.still_owed(job), spoilt=job.next.spoilt)
    turn.live.conversion = ConversionLife()
    if not job.recollection.listening:
        # Stopped while a lost store was being read back: what was heard so far still has to count.
        job.recollection = Recollection(epoch=job.recollection.epoch)
    job.message = ""
    job.settled = turn.live.settings_given  # otherwise its next agent says them anew
    turn.live.pause = None
    spent = job.run.budget
    turn.update_run(budget=Budget(last_step=spent.last_step, saved_step=spent.saved_step))
    counted = turn.live.gathering.counted  # what the last world lost stays as well known as it was
    turn.gather_anew()
    turn.live.gathering.counted, turn.live.gathering.unheard = counted, unheard
    turn.enter(Phase.WAITING)


def begin_anew(turn: Turn, message: control_pb2.RegisterRequest) -> None:
    """Begins the next run: nothing of the last one counts."""
    turn.begin_run(Run(turn.job.run.number + 1, begun_anew=message.new_run))
    turn.job.limit = 0  # whoever scaled the last run has said nothing about this one
    turn.job.probe = message.probe


def ordinal(number: int) -> str:
    """2nd, 3rd, 4th, ..."""
    special = {1: "st", 2: "nd", 3: "rd"} if number % 100 not in (11, 12, 13) else {}
    return f"{number}{special.get(number % 10, 'th')}"


def is_there(turn: Turn, name: str) -> bool:
    """Whether the node is connected and was heard within the node-timeout. (An ended job declares nobody dead.)

    A node that was killed before it opened its stream closes none, and a supervisor may have started the next already.
    """
    presence = turn.live.nodes[name]
    if not presence.opened and presence.spoke and turn.heard - presence.heard > OPENING_SECONDS:
        return False
    return presence.closed is None and turn.heard - presence.heard <= turn.job.settings.node_timeout


def first_agent(turn: Turn, message: control_pb2.RegisterRequest) -> None:
    """Makes what the first agent brings the job's: settings, probe, and what an empty store has forgotten."""
    job = turn.job
    if not job.arrivals:
        turn.begin_phase()  # it waits from now on; the master's process may have been there for long
    being_read_back = job.recollection.listening and job.recollection.settings_epoch >= 0
    if not len(job.nodes) and (not job.settled or (job.embedded and not being_read_back)):
        settle_for(job, message.settings)
    if not job.probe:
        job.probe = message.probe
    if job.epoch == 0 and (job.recollection.listening or message.epoch or message.generation or message.inventory):
        run = job.run.number
        told = settings_from(message.known_settings) if message.HasField("known_settings") else None
        remember(turn, message.epoch, message.inventory, message.finished_runs, told)
        if job.run.number > run and job.recollection.settings_epoch < 0:
            # This agent is the first that knows of this run.
            settle_for(job, message.settings)
    elif job.epoch == 0 and message.finished_runs:
        after = 1 + max(number_of(run) for run in message.finished_runs)
        if after > job.run.number:
            turn.begin_run(Run(after))
    elif job.epoch:
        note_newer(turn, message.node or message.host, message.epoch)
    # An equal number is above only for an empty store: a fenced node of a running job brings the present generation.
    if message.generation > job.generation or (job.epoch == 0 and message.generation == job.generation):
        job.generation = message.generation + 1


def would_settle(turn: Turn, message: control_pb2.RegisterRequest) -> bool:
    """Whether a new agent's settings become the job's if it is let in."""
    job = turn.job
    if message.previous_incarnation or job.node_by(message.incarnation) is not None or turn.live.settings_given:
        return False
    if job.phase.is_terminal:
        return job.phase is Phase.FAILED or (job.phase is Phase.SUCCEEDED and message.new_run)
    return not job.settled and not len(job.nodes)


def misfit(turn: Turn, message: control_pb2.RegisterRequest) -> str:
    """Why this agent's settings, which would become the job's, do not go with the master's --nnodes; or ""."""
    wrong = chosen_from(turn.job, message.settings).problem if would_settle(turn, message) else ""
    return wrong and f"{wrong} (dlrover-master was given this --nnodes)"


def chosen_from(job: Job, settings: control_pb2.Settings) -> Settings:
    """This agent's settings, as the job takes them: --nnodes of the master's own command line stands."""
    chosen = settings_from(settings)
    if job.fixed_nnodes:
        chosen = replace(chosen, min_nodes=job.settings.min_nodes, max_nodes=job.settings.max_nodes)
    return chosen


def settle_for(job: Job, settings: control_pb2.Settings) -> None:
    """Makes this agent's settings the job's."""
    chosen, bounds = chosen_from(job, settings), attrgetter("min_nodes", "max_nodes", "node_unit")
    if chosen.problem:
        return  # what an agent remembers of the last run counts, not its settings
    if bounds(chosen) != bounds(job.settings):
        job.limit = 0  # the limit was within other bounds
    job.settings = chosen
    job.settled = True
