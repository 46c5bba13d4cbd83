"""The companion's orders, with a saver that only remembers what it is asked for."""

from __future__ import annotations

import importlib
import json
import queue
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dalsegno.agent.dlrover import companion as module
from dalsegno.agent.dlrover.companion import Companion
from dalsegno.elastic.checkpoint.files import replace_file


@dataclass
class Config:
    """What the memory of one shard says of itself."""

    rank: int = 0
    world_size: int = 0
    step: int = 0
    writing_shm: bool = False


class Handler:
    """The memory of one shard."""

    def __init__(self) -> None:
        self.config: Any = None
        self.shared_memory: Any = None
        self.metadata = self
        self.resets = 0

    def get_checkpoint_config(self, default: Config) -> Config:
        return self.config or default

    def init_shared_memory(self) -> None:
        """There is none."""

    def set(self, found: dict[str, Any]) -> None:
        assert found == {}
        self.config = None


class Lock:
    """A lock of the library's interface."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def _deal_shared_lock_msg(self, connection: Any) -> None:
        """Serves nobody."""

    def acquire(self, blocking: bool = True) -> bool:
        return self._lock.acquire(blocking=blocking)

    def release(self) -> None:
        if self._lock.locked():
            self._lock.release()

    def locked(self) -> bool:
        return self._lock.locked()


@dataclass
class Saver:
    """The library's saver, as far as the companion knows it."""

    checkpoint_dir: str = "/ckpt"
    storage_meta: Any = None
    local_shard_num: int = 1
    global_shard_num: int = 1
    save_timeout: int = 600
    saved: list[int] = field(default_factory=list)
    directories: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._shm_handlers = [Handler() for _ in range(self.local_shard_num)]
        self._shm_locks = [Lock() for _ in range(self.local_shard_num)]
        self._event_queue = SimpleNamespace(empty=lambda: True)
        self._node_rank, self._is_agent_rank_0, self._latest_step, self.resets = 0, True, 0, 0

    def _sync_shm_to_storage(self) -> None:
        """Nothing is asked for."""

    def _save_shard(self, *arguments: Any) -> bool:
        return True

    def _dist_make_dir(self, path: str, timeout: int = 30) -> None:
        """Is asked for it."""
        self.directories.append(path)

    def wait_saving_checkpoint(self) -> bool:
        return False

    def reset_shared_memory(self) -> None:
        self.resets += 1

    def release_locks(self) -> None:
        for lock in self._shm_locks:
            lock.release()

    def save_shm_to_storage(self) -> None:
        assert not any(lock.locked() for lock in self._shm_locks), "the library's own rule"
        self._latest_step = self._shm_handlers[0].config.step
        self.saved.append(self._latest_step)

    def holds(self, step: int, *, writing: bool = False, world_size: int = 1) -> None:
        """Workers have put a step into memory."""
        for handler in self._shm_handlers:
            handler.config = Config(step=step, writing_shm=writing, world_size=world_size)


class Other(Saver):
    """Another class of savers."""


SAVERS = SimpleNamespace(Saver=Saver, Other=Other)


@pytest.fixture
def companion(monkeypatch: pytest.MonkeyPatch) -> Companion:
    """In its first world, without a saver."""
    library = SimpleNamespace(CheckpointConfig=Config, AsyncCheckpointSaver=SimpleNamespace(), time=None)
    # A thread of the companion's asks this for work.
    queues = SimpleNamespace(SharedQueue=lambda **options: SimpleNamespace(get=threading.Event().wait))
    storage = SimpleNamespace(Storage=lambda **options: SimpleNamespace(**options))
    known = {module._SAVER: library, module._QUEUES: queues, "savers": SAVERS}
    plain = importlib.import_module
    monkeypatch.setattr(
        module.importlib, "import_module", lambda name: known.get(name) or {"storage": storage}.get(name) or plain(name)
    )
    monkeypatch.setattr(module, "_AGREES_WITHIN_SECONDS", 0.1)
    monkeypatch.delenv("RUNTIME_METRICS_PATH", raising=False)
    monkeypatch.setenv("NODE_RANK", "0")
    monkeypatch.setenv("NODE_NUM", "1")
    made = Companion(lambda answer: None)
    enter(made, 1)
    return made


def test_steps_that_elastic_trainer_notes_are_heard(
    companion: Companion, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From its file, where there is no Flash Checkpoint; what is no step is none."""
    told: queue.Queue[dict[str, Any]] = queue.Queue()
    monkeypatch.setattr(companion, "_say", told.put)
    monkeypatch.setattr(module, "_HEAR_EVERY_SECONDS", 0.01)
    noted = tmp_path / "metrics.json"
    noted.write_text("{", encoding="utf-8")
    monkeypatch.setenv("RUNTIME_METRICS_PATH", str(noted))
    threading.Thread(target=companion._hear, daemon=True).start()
    for step in (3, 7):
        replace_file(noted, json.dumps({"step": step, "timestamp": 1}).encode(), lasting=False)
        assert told.get(timeout=30) == {"heard": step, "epoch": 1}


def enter(
    companion: Companion, epoch: int, rank: int = 0, nodes: int = 1, keep: bool = True, parts: bool = True
) -> int:
    """A new world. Returns the step that is in memory there."""
    order = {"do": "world", "epoch": epoch, "node_rank": rank, "nodes": nodes, "keep": keep, "keep_parts": parts}
    return int(companion.take(order)["step"])


def made(companion: Companion, name: str = "Saver", **options: Any) -> Any:
    """A worker has made a checkpointer. Returns the saver that it gets."""
    arguments = {"checkpoint_dir": "/ckpt", "local_shard_num": 1, "global_shard_num": 1, "save_timeout": 600} | options
    arguments["storage_meta"] = SimpleNamespace(module_path="storage", class_name="Storage", kwargs={})
    companion._make_saver(SimpleNamespace(module_path="savers", class_name=name, kwargs=arguments))
    return companion._saver


def test_what_a_world_finds_is_no_step_of_it(companion: Companion, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made just before a crash, it is heard of in the next world only, which seemed to begin one step earlier."""
    told: queue.Queue[dict[str, Any]] = queue.Queue()
    monkeypatch.setattr(companion, "_say", told.put)
    monkeypatch.setattr(module, "_HEAR_EVERY_SECONDS", 0.01)
    saver = made(companion)
    saver.holds(14)
    enter(companion, 2)
    threading.Thread(target=companion._hear, daemon=True).start()
    with pytest.raises(queue.Empty):
        told.get(timeout=0.2)
    saver.holds(15)
    assert told.get(timeout=30) == {"heard": 15, "epoch": 2}


def test_memory_outlives_worlds(companion: Companion) -> None:
    """The next world finds what the last one saved, and the saver knows its new rank."""
    saver = made(companion)
    saver.holds(14)
    assert enter(companion, 2, rank=1, nodes=2) == 14
    assert (saver._node_rank, saver._is_agent_rank_0, saver.resets) == (1, False, 1)


def test_what_others_went_on_without_is_dropped(companion: Companion) -> None:
    """This node was not in the world before."""
    made(companion).holds(14)
    assert enter(companion, 5, keep=False) == 0
    assert companion.take({"do": "freeze"})["step"] == 0


@pytest.mark.parametrize("torn", ["flag", "lock"])
def test_torn_memory_is_dropped(companion: Companion, torn: str) -> None:
    """A worker died while it wrote: its library says so, or it held the lock."""
    saver = made(companion)
    saver.holds(14, writing=torn == "flag")
    if torn == "lock":
        companion._torn.add(0)
    assert enter(companion, 2) == 0
    saver.holds(15)
    assert enter(companion, 3) == 15, "written anew"


def test_an_engine_that_never_says_that_it_has_written(companion: Companion) -> None:
    """FSDP's leaves the flag as it is, and fills in nothing else."""
    made(companion).holds(14, writing=True, world_size=0)
    assert enter(companion, 2) == 14


def test_what_a_world_found_and_did_not_replace_is_dropped(companion: Companion) -> None:
    """It may have been unable to load it."""
    saver = made(companion)
    saver.holds(14)
    assert enter(companion, 2) == 14
    assert enter(companion, 3) == 0
    saver.holds(9)
    assert enter(companion, 4) == 9


@pytest.mark.parametrize(("rank", "nodes", "parts"), [(1, 2, True), (0, 3, True), (0, 2, False)])
def test_parts_are_of_one_world(companion: Companion, rank: int, nodes: int, parts: bool) -> None:
    """Another rank, another number of nodes, or a newcomer: the library would take them for another rank's."""
    enter(companion, 2, nodes=2)
    saver = made(companion, global_shard_num=2)
    saver.holds(14)
    assert enter(companion, 3, nodes=2) == 14
    saver.holds(15)
    assert enter(companion, 4, rank=rank, nodes=nodes, parts=parts) == 0


def test_the_first_node_writes_what_all_have(companion: Companion) -> None:
    """Its locks are free again by then. What is on the disk is not written again."""
    saver = made(companion)
    saver.holds(14)
    assert companion.take({"do": "freeze"}) == {"step": 14, "spread": False}
    assert saver._shm_locks[0].locked()
    for _ in range(2):
        assert companion.take({"do": "save", "part": False}) == {"step": 14, "saved": 14}
    assert saver.saved == [14]
    enter(companion, 2, rank=1, nodes=2)
    saver.holds(15)
    assert companion.take({"do": "save", "part": False})["saved"] == 0


def test_parts_are_written_only_by_agreement(companion: Companion) -> None:
    """Nobody knows the others' step but the master."""
    enter(companion, 2, rank=1, nodes=2)
    saver = made(companion, global_shard_num=2)
    saver.holds(14)
    assert companion.take({"do": "freeze"}) == {"step": 14, "spread": True}
    assert companion.take({"do": "save", "part": False})["saved"] == 0
    assert companion.take({"do": "save", "part": True})["saved"] == 14


class Committing(Saver):
    """It is to write step 14, and then waits for a part that another node does not write, as the library's does."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._stop_commit = False

    def wait_saving_checkpoint(self) -> bool:
        if self._latest_step == 0:
            if not self._shm_locks[0].locked():
                # Its own part is written under the lock. Only now it begins to wait, and may be told not to.
                self._latest_step, self._stop_commit = 14, False
            return True
        return not self._stop_commit


SAVERS.Committing = Committing


def test_an_older_save_that_waits_for_others_gives_way(companion: Companion) -> None:
    """All nodes hold a newer step, and write that one: nobody may ever complete the older one."""
    enter(companion, 2, nodes=2)
    saver = made(companion, "Committing", global_shard_num=2)
    saver.holds(15)
    companion.take({"do": "freeze"})
    assert companion.take({"do": "save", "part": True}) == {"step": 15, "saved": 15}


def test_a_save_of_what_is_in_memory_is_waited_for(companion: Companion) -> None:
    """The other nodes write the same step now."""
    enter(companion, 2, nodes=2)
    saver = made(companion, "Committing", global_shard_num=2)
    saver.holds(14)
    saving = threading.Thread(target=companion.take, args=({"do": "save", "part": True},), daemon=True)
    saving.start()
    saving.join(1.0)
    assert (saving.is_alive(), saver._latest_step, saver._stop_commit) == (True, 14, False)
    saver._stop_commit = True
    saving.join(30)
    assert (saving.is_alive(), saver.saved) == (False, [])


class Staged(Saver):
    """It is to write step 14, and waits for a directory that the first node has left out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._stop_commit = self.waits = self._is_agent_rank_0 = False
        self.storage = SimpleNamespace(exists=lambda path: "there" in path)

    def wait_saving_checkpoint(self) -> bool:
        return self.waits

    def wait_in(self, path: str) -> None:
        self.waits = True
        self._dist_make_dir(path)
        self.waits = False


SAVERS.Staged = Staged


def test_a_directory_of_another_node_is_waited_for(companion: Companion) -> None:
    """As long as the library does, and no longer than needed. The first node makes its own."""
    enter(companion, 2, rank=1, nodes=2)
    saver = made(companion, "Staged", global_shard_num=2)
    saver._dist_make_dir("/ckpt/there", 300)
    began = time.monotonic()
    saver._dist_make_dir("/ckpt/never", 1)
    assert time.monotonic() - began >= 1
    enter(companion, 3, rank=0)
    saver._dist_make_dir("/ckpt/never", 300)
    assert saver.directories == ["/ckpt/there", "/ckpt/never", "/ckpt/never"]


def test_a_directory_of_an_older_save_is_not_waited_for(companion: Companion) -> None:
    """The first node has dropped that step. All hold a newer one, and write it: half a minute would be lost."""
    enter(companion, 2, rank=1, nodes=2)
    saver = made(companion, "Staged", global_shard_num=2)
    saver.holds(15)
    waiting = threading.Thread(target=saver.wait_in, args=("/ckpt/14.done",), daemon=True)
    waiting.start()
    companion.take({"do": "freeze"})
    saving = threading.Thread(target=companion.take, args=({"do": "save", "part": True},), daemon=True)
    saving.start()
    saving.join(15)
    assert (saving.is_alive(), waiting.is_alive(), saver.saved) == (False, False, [15])
    # The next one is waited for again.
    began = time.monotonic()
    saver._dist_make_dir("/ckpt/never", 1)
    assert time.monotonic() - began >= 1


def test_a_step_that_was_written_over_is_not_waited_for(companion: Companion) -> None:
    """A worker saves to memory soon after it has asked for a save to the disk. One that is coming is waited for."""
    saver = made(companion, local_shard_num=2)
    saver.holds(14)
    assert saver._check_shard_step_consistence(14)
    saver._shm_handlers[1].config = Config(step=15, world_size=1)
    began = time.monotonic()
    assert not saver._check_shard_step_consistence(14)
    assert time.monotonic() - began < 5, "the library waits for 15 s, and with it all that is to be written"
    comes = threading.Timer(0.3, saver.holds, (15,))
    comes.start()
    assert saver._check_shard_step_consistence(15)
    assert not saver._check_shard_step_consistence(16, 0.1)


def test_a_worker_that_waits_with_its_lock_holds_nobody_up(companion: Companion) -> None:
    """Its peers may be gone. It is killed next, and has written nothing."""
    saver = made(companion)
    saver.holds(14)
    saver._shm_locks[0].acquire()
    assert companion.take({"do": "freeze"})["step"] == 14
    assert enter(companion, 2) == 14
    assert not saver._shm_locks[0].locked()


def test_each_world_may_save_elsewhere(companion: Companion) -> None:
    """The same saver gets the new directory. The first checkpointer of a world counts."""
    saver = made(companion)
    assert made(companion, checkpoint_dir="/late").checkpoint_dir == "/ckpt"
    enter(companion, 2)
    assert made(companion, checkpoint_dir="/e2") is saver
    assert saver.checkpoint_dir == "/e2"


def test_each_shard_is_marked_with_its_rank(companion: Companion) -> None:
    """FSDP's engine calls all of them rank 0; the others know theirs."""
    seen = list[int]()

    def original(step: int, shard: int, config: Config, done: str) -> None:
        seen.append(config.rank)

    saver = Saver(local_shard_num=2)
    saver._node_rank = 3
    for config in (Config(world_size=0), Config(rank=5, world_size=8)):
        module._save_shard(saver, original, 14, 1, config, "/done")
    assert seen == [7, 5]


def test_an_order_of_another_version_is_an_error(companion: Companion) -> None:
    with pytest.raises(ValueError, match="another version"):
        companion.take({"do": "dance"})
