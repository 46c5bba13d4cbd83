"""Bugs of the shells that were there once, planted again: in threads, timers, terminals, and where many nodes are."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Sequence
from typing import Any

from dalsegno.agent.control.master_client import MasterClient
from dalsegno.agent.decisions import events as ev
from dalsegno.agent.shell.effects import Effects
from dalsegno.agent.shell.elastic_agent import ElasticAgent
from dalsegno.agent.workers.workers import WorkersContext
from dalsegno.master.brain import brain, calls, forming, liveness, membership
from dalsegno.master.brain import running as phases
from dalsegno.master.brain.events import Reply
from dalsegno.master.brain.gathering import Gathering
from dalsegno.master.brain.live import State
from dalsegno.master.brain.state import Node
from dalsegno.master.brain.turn import Turn
from dalsegno.protos import control_pb2
from dalsegno.protos.outlet import Outlet

from .. import threads
from ..plan import Plan
from ..threads import running
from .brain import Plant, Replace, gives_up_a_slow_save, is_slow


def loses_one_node_per_move(original: Any) -> Any:
    def lose(turn: Turn, dead: Sequence[tuple[Node, str]]) -> None:
        original(turn, dead[:1])

    return lose


def forgives_everybody_when_held_up(original: Any) -> Any:
    def held_up(state: State, seconds: float, now: float) -> None:
        original(state, seconds, now)
        for presence in state.live.nodes.values():
            presence.heard = state.live.clock.at(now)

    return held_up


def looks_at_all_nodes_for_every_node(original: Any) -> Any:
    def death_of(turn: Turn, node: Node, timeout: float) -> str:
        beside = [other for other in turn.job.nodes.values() if turn.presence(other).heard >= turn.heard - timeout]
        return original(turn, node, timeout) if beside or node else ""

    return death_of


def decides_at_every_heartbeat(original: Any) -> Any:
    def note(state: State, message: calls.Noted, now: float) -> tuple[Reply, bool]:
        answer = original(state, message, now)
        brain.handle_all(state, [], now)
        result: tuple[Reply, bool] = answer
        return result

    return note


def signals_whom_it_found_alive_before(original: Any) -> Any:
    def stop(self: WorkersContext, grace: float, still: float = math.inf, signs: Any = ()) -> None:
        for _ in ("as told", "for good"):
            for one in self._running:
                process: Any = one.process._process  # type: ignore[union-attr]
                if process.reaped:
                    continue
                # Between the look and the signal the watcher runs.
                running().sleep(0.01)
                if process.reaped:
                    raise ProcessLookupError(3, "No such process")
                process.signalled(signal.SIGKILL)
            for one in self._running:
                one.ended.wait(0.2)
        for one in self._running:
            one.ended.wait()

    return stop


def forgets_to_say_that_workers_stopped(original: Any) -> Any:
    def stop_world(self: ElasticAgent, order: ev.StopWorkers) -> None:
        context = self._context

        def stop() -> None:
            if context is not None:
                context.stop(order.grace, order.still)
            self._mailbox.put(ev.WorkersStopped(order.epoch))

        threads.Thread(target=stop, name="stop-workers", daemon=True).start()

    return stop_world


def starts_a_timer_per_registration(original: Any) -> Any:
    def register(self: Any, previous: str, node: str) -> None:
        original(self, previous, node)
        if not previous:
            refused = ev.Refused("UNAVAILABLE", "no master answered: is it running at that address?")
            # The one before, if there is one, runs on.
            self.refusing = threads.Timer(self._config.connect_timeout, self._mailbox.put, (refused,))
            self.refusing.start()

    return register


def ends_the_last_timer(original: Any) -> Any:
    def registered(self: Any, incarnation: str, reply: control_pb2.RegisterReply) -> None:
        if getattr(self, "refusing", None) is not None:
            self.refusing.cancel()
        original(self, incarnation, reply)

    return registered


def writes_to_the_terminal_itself(original: Any) -> Any:
    def put(self: Outlet, data: bytes, patience: float = 0.0) -> bool:
        with self._changed:
            self._size_bytes += len(data)
        self._write(data)
        return True

    return put


def tells_at_once(original: Any) -> Any:
    def tell(self: MasterClient, session: int, tell: Callable[[], None]) -> bool:
        with self._changed:
            if session != self._session:
                return False
        tell()
        return True

    return tell


def opens_the_stream_before_it_tells(original: Any) -> Any:
    def opened(self: MasterClient, waiting: Any, reply: control_pb2.RegisterReply) -> None:
        with self._changed:
            if waiting.session != self._session:
                return
            self._node = reply.node
            self._registered = True
            incarnation = self._incarnation
            self._changed.notify_all()
        running().sleep(0.1)  # as on a busy machine: without it one schedule in hundreds shows it
        self._listener.registered(incarnation, reply)

    return opened


def waits_for_quiet_without_end(original: Any) -> Any:
    def is_gathered(turn: Turn, waited_for: list[Node], ready: list[Node]) -> bool:
        gathered: bool = original(turn, waited_for, ready)
        turn.live.gathering.complete_at = None
        return gathered

    return is_gathered


def waits_for_whoever_crashes_in_a_loop(original: Any) -> Any:
    def is_crash_looping(self: Gathering, name: str, now: float) -> bool:
        return False

    return is_crash_looping


def _plant(
    owner: Any,
    name: str,
    replace: Replace,
    *caught: str,
    suits: Callable[[Plan], bool],
    seeds: int,
    first: int = 1,
    also: tuple[tuple[Any, str, Replace], ...] = (),
) -> tuple[str, Plant]:
    made = Plant(owner, name, replace, frozenset(caught), also=also, suits=suits, seeds=seeds, first=first)
    return replace.__name__, made


def has(*names: str) -> Callable[[Plan], bool]:
    """Plans in which one of these happens."""
    return lambda plan: any(name in names for _, name in plan.happenings)


SHELL_PLANTS: dict[str, Plant] = dict(
    [
        _plant(
            membership,
            "lose",
            loses_one_node_per_move,
            "no event is set aside",
            suits=lambda plan: plan.crowd == 100 and has("several_deaths")(plan),
            seeds=6,
            first=594,
        ),
        _plant(
            brain,
            "held_up",
            forgives_everybody_when_held_up,
            "who is gone is noticed",
            suits=lambda plan: 0 < plan.held_up <= plan.settings.node_timeout and has("stuck_node")(plan),
            seeds=40,
            first=105,
        ),
        _plant(
            liveness,
            "death_of",
            looks_at_all_nodes_for_every_node,
            "turns are short",
            suits=lambda plan: plan.crowd == 200,
            seeds=3,
            first=722,
            also=((brain, "note", decides_at_every_heartbeat),),
        ),
        _plant(
            WorkersContext,
            "stop",
            signals_whom_it_found_alive_before,
            "who stopped is heard of",
            "a leave ends",
            "ProcessLookupError",
            suits=lambda plan: plan.nproc > 1 and has("kill_node", "crash_worker", "kill_agent", "scale")(plan),
            seeds=60,
            first=270,
            also=((ElasticAgent, "_stop_world", forgets_to_say_that_workers_stopped),),
        ),
        _plant(
            Effects,
            "_register",
            starts_a_timer_per_registration,
            "exit codes",
            suits=lambda plan: plan.connect_timeout < 15.0 and has("restart_named")(plan),
            seeds=60,
            also=((Effects, "_registered", ends_the_last_timer),),
        ),
        _plant(
            phases,
            "saving",
            gives_up_a_slow_save,
            "planned changes lose nothing",
            suits=is_slow,
            first=1477,
            seeds=60,
        ),
        _plant(
            Outlet,
            "put",
            writes_to_the_terminal_itself,
            "decisions go on",
            suits=has("blocked_console"),
            seeds=60,
        ),
        _plant(
            MasterClient,
            "_opened",
            opens_the_stream_before_it_tells,
            "who is told knows",
            suits=lambda plan: plan.holds[0] > 0,
            seeds=30,
            first=804,
            also=((MasterClient, "_tell", tells_at_once),),
        ),
        _plant(
            forming,
            "is_gathered",
            waits_for_quiet_without_end,
            "liveness",
            suits=lambda plan: plan.loopers > 0,
            seeds=10,
            first=137,
            also=((Gathering, "is_crash_looping", waits_for_whoever_crashes_in_a_loop),),
        ),
    ]
)
