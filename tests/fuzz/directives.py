"""Directives that no master of ours gives, to an agent's effects and decisions: it must stay itself."""

from __future__ import annotations

import math
import random
from pathlib import Path

from dalsegno.agent.control.master_checks import problem_of
from dalsegno.agent.decisions import events as ev
from dalsegno.agent.decisions import handling
from dalsegno.agent.workers.worker_env import place_of, worker_environment
from dalsegno.protos import control_pb2 as pb

from .good_agents import Broken
from .values import disturb, mutate

__all__ = ["INCARNATION", "NPROC", "fuzz_directives", "run_order"]

INCARNATION, NPROC = "0123456789abcdef", 2
_MOST_ACTIONS = 20


def run_order() -> pb.Directive:
    """The second of three nodes of two workers, with everything that a directive can carry."""
    ref = pb.CheckpointRef(name="step-7.e3.1", digest="ab" * 32)
    head = pb.Checkpoint(ref=ref, run_id="run-0001", step=7, epoch=3, form=pb.FORM_SHARDED, bytes=1000)
    return pb.Directive(
        generation=2,
        phase=pb.PHASE_RUNNING,
        epoch=4,
        run_id="run-0001",
        run=pb.World(
            epoch=4,
            run_id="run-0001",
            resume=pb.ResumePoint(source=head, form=pb.FORM_SHARDED),
            store_host="host-1",
            store_port=29500,
            nodes=3,
            world_size=6,
            place=pb.Place(node="b", incarnation=INCARNATION, group_rank=1, first_rank=2, nproc=NPROC),
        ),
        convert=pb.Conversion(lease=1, source=head),
        verify=pb.Verification(number=1, ref=ref),
        prune=[pb.CheckpointRef(name="step-1.e1.1", digest="cd" * 32)],
        head=head,
        notices=[pb.Notice(sequence=1, text="a node joins")],
        settings=pb.Settings(min_nodes=1, max_nodes=4, node_unit=1, drain_timeout=30.0, grow_interval=-1.0),
        sight=ref,
    )


def _order(rng: random.Random) -> pb.Directive:
    directive = run_order()
    match rng.randrange(8):
        case 0:
            directive.drain.run.CopyFrom(run_order().run)
            directive.drain.epoch = 4
        case 1:
            directive.gather.round = 5
            directive.gather.resume.CopyFrom(directive.head.ref)
        case 2:
            directive.wait.reason = "2 nodes are missing"
            directive.wait.look_for.CopyFrom(directive.head.ref)
        case 3:
            directive.fenced.reason = "silent for 15 s"
        case 4:
            directive.release.SetInParent()
        case 5:
            directive.finish.message = "done"
    if rng.random() < 0.1:
        try:
            return pb.Directive.FromString(mutate(rng, directive.SerializeToString()))
        except Exception:  # what is no message never gets this far
            return directive
    disturb(rng, directive)
    return directive


def _registered() -> handling.AgentState:
    state = handling.fresh(handling.AgentSettings(nproc=NPROC))
    state, _ = handling.handle(state, ev.Started(), 0.0)
    reply = pb.RegisterReply(generation=1, node="b", run_id="run-0001")
    return handling.handle(state, ev.Registered(INCARNATION, reply), 0.0)[0]


def fuzz_directives(seed: int, count: int) -> tuple[str, int]:
    """Returns what did not hold, or ""; and how many directives were believed."""
    believed = 0
    for number in range(count):
        rng = random.Random(f"directives/{seed}/{number}")
        state, now = _registered(), 1.0
        for _ in range(3):
            directive = _order(rng)
            if problem_of(directive, INCARNATION, NPROC):
                continue
            believed += 1
            now += 1.0
            try:
                state, actions = handling.handle(state, ev.Directed(directive), now)
                _check(state, actions, now)
            except Exception as error:
                return f"seed {seed}, number {number}: {type(error).__name__}: {error} after {directive}", believed
    return "", believed


def _check(state: handling.AgentState, actions: list[ev.Action], now: float) -> None:
    if len(actions) > _MOST_ACTIONS:
        raise Broken(f"one directive made {len(actions)} actions")
    if state.wake is not None and not math.isfinite(state.wake):
        raise Broken(f"it is to be woken at {state.wake}")
    # A tick at once must be the last of its kind: nothing spins.
    for _ in range(3):
        if state.wake is None or state.wake > now or state.ended:
            break
        state, _actions = handling.handle(state, ev.Tick(), now)
    else:
        raise Broken("it is woken again and again without time passing")
    for action in actions:
        match action:
            case ev.StartWorkers():
                place = place_of(action.world, INCARNATION)
                settings = pb.Settings()
                environment = worker_environment(
                    action.world, place, settings, 1, "job", Path("/runs") / action.world.run_id, "default", {}
                )
                if len(environment) != NPROC:
                    raise Broken(f"{len(environment)} workers are to be started instead of {NPROC}")
                if any("\0" in value for one in environment for value in one.values()):
                    raise Broken("a worker cannot be started with this environment")
