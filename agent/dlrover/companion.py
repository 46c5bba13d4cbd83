"""The companion process of one node: DLRover's own saver of Flash Checkpoint, from the user's installation.

It holds the sockets through which the workers hand over what they put into shared memory, and writes that to the disk.
Under DLRover's launcher this is a thread of its agent; here it is a process of its own, so that the agent imports
nothing of the user's. It outlives workers and worlds, and ends with the agent.

It reads one JSON object a line from its standard input, and answers each with one line on its standard output:

    {"do": "world", "epoch": 2, "node_rank": 0, "nodes": 1, "keep": true, "keep_parts": true}
        a new world: what is in memory stays, or is dropped; where it is spread over nodes, only with "keep_parts".
        With "again" a companion has died in this world, and the saver is made as its workers wanted that one
    {"do": "freeze"}
        from now on no worker writes into the memory
    {"do": "save", "part": false}
        writes what is in memory to the disk, if this node has all of it; or its part, if other nodes have the rest
    {"do": "busy"}
        whether a save is on its way to the disk
    {"do": "close"}
        removes sockets and memory, and ends

Answers say which step is in memory (`step`, 0: none), whether other nodes have parts of it (`spread`), and what went
wrong (`problem`). In between it says each new step in memory, {"heard": 14, "epoch": 2}, and what workers asked for,
{"made": …}, null if that cannot be told.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from ..own_modules import take_first_path
from ..processes.keeper import DEAF_TO
from . import latest
from .orders import objects_of, plain_of
from .watched import watch

__all__ = ["Companion", "main"]

_SAVER = "dlrover.python.elastic_agent.torch.ckpt_saver"
_QUEUES = "dlrover.python.common.multi_process"
# Seconds that a worker may hold a lock before it writes: it waits for the other ranks then, maybe in vain.
_AGREES_WITHIN_SECONDS = 2.0
# Seconds that it may write.
_WRITES_WITHIN_SECONDS = 30.0
_LOOK_EVERY_SECONDS = 0.05
# The longest pause of the library's saver, in seconds, which otherwise waits for other nodes' files by the second.
_LONGEST_PAUSE_SECONDS = 0.2
# Seconds between two looks for a new step.
_HEAR_EVERY_SECONDS = 0.25


class Companion:
    """The saver, made when a worker asks for one, and what the agent does with it.

    Args:
        say: prints one answer.
    """

    def __init__(self, say: Callable[[dict[str, Any]], None]) -> None:
        self._say = say
        self._module = importlib.import_module(_SAVER)
        self._module.time = _Impatient()  # type: ignore[attr-defined]
        queues = importlib.import_module(_QUEUES)
        self._saver: Any = None
        self._made_in = self._world = self._epoch = 0
        # Indices of the locks that this process holds, and of those whose holders died.
        self._frozen: list[int] = []
        self._torn: set[int] = set()
        # The step that the present world has found in memory.
        self._found = 0
        # What the saver's own thread writes is given up for a later step.
        self._given_up = False
        # (rank of this node, nodes) of the present world.
        self._place = (0, 0)
        self._lock = threading.Lock()
        self._queue: Any = queues.SharedQueue
        threading.Thread(target=self._hear, name="steps", daemon=True).start()

    # ---- the saver --------------------------------------------------------------------------------------------------

    def _make_savers(self, orders: Any) -> None:
        while True:
            order = orders.get()
            try:
                with self._lock:
                    self._make_saver(order)
                self._say({"made": _told(order)})
            except Exception as error:
                self._say({"problem": f"its saver cannot be made: {type(error).__name__}: {error}"})

    def _make_saver(self, order: Any) -> None:
        """A worker of local rank 0 has made a checkpointer, and says what it needs. The first of a world counts."""
        wanted = getattr(importlib.import_module(order.module_path), order.class_name)
        saver, arguments = self._saver, dict(order.kwargs)
        if saver is not None and self._made_in == self._world:
            return
        if saver is not None and (type(saver), saver.local_shard_num) == (wanted, arguments["local_shard_num"]):
            storage = arguments["storage_meta"]
            made = getattr(importlib.import_module(storage.module_path), storage.class_name)
            saver.checkpoint_dir = arguments["checkpoint_dir"]
            saver.storage = made(**storage.kwargs)
            saver._save_timeout = arguments["save_timeout"]
        else:
            if saver is not None:
                saver.close()
            self._saver = saver = wanted(**arguments)
            # What asks the class for its saver gets this one.
            self._module.AsyncCheckpointSaver._saver_instance = saver
            for number, lock in enumerate(saver._shm_locks):
                watch(lock, partial(self._torn.add, number))
            saver._save_shard = partial(_save_shard, saver, saver._save_shard)
            saver._dist_make_dir = partial(self._make_directory, saver, saver._dist_make_dir)
            saver._check_shard_step_consistence = partial(self._holds_step, saver)
            threading.Thread(target=saver._sync_shm_to_storage, name="saver", daemon=True).start()
        self._made_in = self._world

    def _make_directory(self, saver: Any, original: Any, path: str, timeout: int = 30) -> None:
        """Makes a step's directory on the first node; others wait for it, and it may never do that.

        Args:
            timeout: seconds.
        """
        until = time.monotonic() + (0.0 if saver._is_agent_rank_0 else timeout)
        while time.monotonic() < until and not self._given_up and not saver.storage.exists(path):
            time.sleep(_LONGEST_PAUSE_SECONDS)  # why: the other node says nothing
        original(path, 1)

    def _holds_step(self, saver: Any, step: int, timeout: float = 15) -> bool:
        """Whether all of this node's memory has a step, before it is written; it may just be coming.

        A later one has been written over it, and then it does not come again. The library waits all the same.
        """
        until = time.monotonic() + timeout
        while True:
            steps = [int(config.step) for config in self._configs(saver) if config.step > 0]
            if all(one == step for one in steps):
                return True
            if self._given_up or max(steps) > step or time.monotonic() > until:
                return False
            time.sleep(_LOOK_EVERY_SECONDS)  # why: memory does not tell of a change

    def _configs(self, saver: Any = None) -> Iterator[Any]:
        """What the memory of each local shard says of itself."""
        for handler in (saver or self._saver)._shm_handlers:
            yield handler.get_checkpoint_config(self._module.CheckpointConfig())

    def _step(self) -> int:
        """The step that all of this node's memory has; 0: there is none, or a worker died while it wrote."""
        if self._saver is None:
            return 0
        # Only an engine that fills in the rest also says that it has written: see `_save_shard`.
        steps = {0 if config.writing_shm and config.world_size else int(config.step) for config in self._configs()}
        return steps.pop() if len(steps) == 1 and not self._torn else 0

    def _spread(self) -> bool:
        """Whether other nodes have parts of the checkpoint."""
        return self._saver is not None and int(self._saver.global_shard_num) > int(self._saver.local_shard_num)

    def _drop(self) -> None:
        """Forgets what is in memory: it is torn, or of a history that went on without this node."""
        for handler in self._saver._shm_handlers:
            if handler.shared_memory is None:
                handler.init_shared_memory()
            if handler.shared_memory is not None:
                # A view of it may be alive still; its memory is then freed with that.
                with contextlib.suppress(BufferError):
                    handler.shared_memory.close()
                handler.shared_memory.unlink()
                handler.shared_memory = None
            handler.metadata.set({})
        self._torn.clear()

    # ---- orders -----------------------------------------------------------------------------------------------------

    def take(self, order: dict[str, Any]) -> dict[str, Any]:
        """Carries out one order. Returns the answer."""
        match order["do"]:
            case "world":
                with self._lock:
                    self._epoch = int(order["epoch"])
                    step = self._enter(int(order["node_rank"]), int(order["nodes"]), order["keep"], order["keep_parts"])
                    if order.get("again") is not None:
                        self._make_saver(objects_of(order["again"]))
                    return step
            case "freeze":
                return {"step": self._freeze(), "spread": self._spread()}
            case "save":
                return self._save(bool(order.get("part")))
            case "busy":
                return {"busy": self._is_busy()}
            case other:
                raise ValueError(f"an order of another version: {other!r}")

    def _enter(self, node_rank: int, nodes: int, keep: bool, keep_parts: bool) -> dict[str, Any]:
        self._world += 1
        keep_parts, self._place = keep_parts and self._place == (node_rank, nodes), (node_rank, nodes)
        os.environ.update(NODE_RANK=str(node_rank), NODE_NUM=str(nodes))
        if self._world == 1:
            # Not earlier: a saver that is made for a world knows its place in it.
            orders = self._queue(name="factory", create=True)
            threading.Thread(target=self._make_savers, args=(orders,), name="savers", daemon=True).start()
        saver = self._saver
        if saver is None:
            return {"step": 0}
        saver._node_rank, saver._is_agent_rank_0 = node_rank, node_rank == 0
        step = self._step()
        # Shards are of the world that wrote them: its library would take them for those of another one.
        foreign = not keep_parts and int(saver.global_shard_num) > 1
        # The last world has saved nothing: maybe it cannot load this. What could be saved of it is on the disk.
        in_vain = step == self._found
        if not keep or not step or foreign or in_vain:
            self._drop()
            # Steps are made again, so they may be saved again.
            saver._latest_step = 0
            step = 0
        self._found = step
        # A commit that waits for nodes of the world before waits in vain. Segments may have been made anew.
        saver.reset_shared_memory()
        self._thaw()
        if not saver.wait_saving_checkpoint():
            # Of workers that are gone. A lock that the saver itself holds protects what it reads.
            saver.release_locks()
        return {"step": step}

    def _freeze(self) -> int:
        """Takes the locks without which no worker writes. Then all nodes have the same step, because ranks agree."""
        if self._saver is None:
            return 0
        began = time.monotonic()
        for number, lock in enumerate(self._saver._shm_locks):
            while number not in self._frozen:
                if lock.acquire(blocking=False):
                    self._frozen.append(number)
                    break
                writes = any(config.writing_shm for config in self._configs())
                limit = _WRITES_WITHIN_SECONDS if writes else _AGREES_WITHIN_SECONDS
                if time.monotonic() > began + limit or self._is_busy():
                    break
                time.sleep(_LOOK_EVERY_SECONDS)  # why: a lock of another library, which tells nobody
        return self._step()

    def _thaw(self) -> None:
        for number in self._frozen:
            self._saver._shm_locks[number].release()
        self._frozen = []

    def _save(self, part: bool) -> dict[str, Any]:
        """Once no worker is left: brings what is in memory to the disk. Where each node has all, the first does."""
        saver, step = self._saver, self._step()
        if not step or (not part and (self._spread() or not saver._is_agent_rank_0)):
            return {"step": step, "saved": 0}
        # Its own thread may wait for one of these locks.
        self._thaw()
        while self._is_busy():
            if part and saver._latest_step < step:
                # An older step may wait for another node's part in vain. All nodes hold this one, and write it.
                saver._stop_commit = self._given_up = True
            time.sleep(_LOOK_EVERY_SECONDS)  # why: its thread says nothing when it is done
        self._given_up = False
        if not saver.wait_saving_checkpoint():
            saver.release_locks()
        if step > saver._latest_step:
            saver.save_shm_to_storage()
        return {"step": step, "saved": step if saver._latest_step >= step else 0}

    def _is_busy(self) -> bool:
        saver = self._saver
        return saver is not None and bool(saver.wait_saving_checkpoint() or not saver._event_queue.empty())

    # ---- beside -----------------------------------------------------------------------------------------------------

    def _hear(self) -> None:
        """Says each new step in memory or, without Flash Checkpoint, each that `ElasticTrainer` notes.

        That class counts from the start of its process.
        """
        said = 0
        while True:
            time.sleep(_HEAR_EVERY_SECONDS)  # why: neither memory nor file tells of a change
            with self._lock:
                epoch, step = self._epoch, _noted() if self._saver is None else self._step()
            # Without a world it does not know yet whether it will have a saver.
            if step != said and epoch:
                said = step
                # What this world has found was made in the one before.
                if step != self._found:
                    self._say({"heard": step, "epoch": epoch})

    def close(self) -> None:
        """Removes what it holds."""
        if self._saver is not None:
            self._saver.close()


def _save_shard(saver: Any, original: Any, step: int, shard: int, config: Any, done: str) -> Any:
    """Writes one shard. Each leaves a file with its rank when it is done; FSDP's engine calls all of them rank 0."""
    if not config.world_size:
        config = replace(config, rank=saver._node_rank * saver.local_shard_num + shard)
    return original(step, shard, config, done)


class _Impatient:
    """The library's clock."""

    time = staticmethod(time.time)

    @staticmethod
    def sleep(seconds: float) -> None:
        time.sleep(min(seconds, _LONGEST_PAUSE_SECONDS))  # why: it polls; see `_LONGEST_PAUSE_SECONDS`


def _told(order: Any) -> Any:
    try:
        return plain_of(order)
    except TypeError:
        return None


def _noted() -> int:
    """The last step in `ElasticTrainer`'s file; 0: there is none."""
    try:
        with open(os.environ["RUNTIME_METRICS_PATH"], encoding="utf-8") as file:
            return int(json.load(file)["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _answer(companion: Companion, order: dict[str, Any], say: Callable[[dict[str, Any]], None]) -> None:
    try:
        say({"answers": order["number"], **companion.take(order)})
    except Exception as error:
        say({"answers": order["number"], "problem": f"{order['do']}: {type(error).__name__}: {error}"})


def main() -> None:
    """Answers orders until there are no more. Its argument is what the script has first on `sys.path`."""
    take_first_path(sys.argv[1])
    # Notices to all processes of a node are meant for the agent, which then needs this one.
    for signum in DEAF_TO:
        signal.signal(signum, signal.SIG_IGN)
    # Only answers go there: the library may print.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    writing = threading.Lock()

    def say(answer: dict[str, Any]) -> None:
        with writing:
            print(json.dumps(answer), file=answers, flush=True)

    latest.install()
    try:
        companion = Companion(say)
    except Exception as error:
        say({"problem": f"its saver cannot be loaded: {type(error).__name__}: {error}"})
        return
    say({"up": True})
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "close":
            break
        if order["do"] == "save":
            # It may wait for other nodes, and the next world does not.
            threading.Thread(target=_answer, args=(companion, order, say), name="save", daemon=True).start()
        else:
            _answer(companion, order, say)
    companion.close()
    # Its threads wait for nothing any more.
    os._exit(0)


if __name__ == "__main__":
    main()
