"""A conversion of a run's checkpoint: what it makes, how it fails, and that it dies and is followed by another."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dalsegno.elastic.checkpoint import Manifest, describe, inventory, seal, verify
from dalsegno.elastic.checkpoint.durability import FileSystem
from dalsegno.elastic.universal import (
    EXIT_ENVIRONMENT,
    EXIT_IMPOSSIBLE,
    EXIT_READY,
    EXIT_SOURCE_BAD,
    EnvironmentFailed,
    SourceBad,
    Watch,
    Wish,
    convert,
    convert_directory,
    upstream,
)
from dalsegno.elastic.universal.journal import JOURNAL
from dalsegno.elastic.universal.loading import load
from dalsegno.elastic.universal.output import ConversionOutput
from tests.support.checkpoints.conversions import (
    MODULE,
    Died,
    convert_forked,
    convert_halfway,
    convert_here,
    die_after,
    target_of,
)
from tests.support.checkpoints.disks import sync_as_if
from tests.support.checkpoints.power import Power, only_whole_checkpoints, sealed
from tests.support.workers.ranks import Rank
from tests.support.workers.zero_runs import Sources, seal_sharded, worker_environment

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def source(sources: Sources, tmp_path: Path) -> Path:
    """A ZeRO-2 checkpoint of two ranks that the test may damage."""
    made, _ = sources.get(2, 2)
    shutil.copytree(made, tmp_path / made.name)
    return tmp_path / made.name


def reseal(source: Path, change: Callable[[Path], None]) -> None:
    """Changes a checkpoint as if it had been written so."""
    (source / "MANIFEST.json").unlink()
    change(source)
    seal_sharded(source, stage=2, world=2, step=3)


def rewrite_model(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def rewrite(source: Path) -> None:
        path = source / "mp_rank_00_model_states.pt"
        state = load(path)
        change(state)
        torch.save(state, path)

    return rewrite


def test_ready(source: Path) -> None:
    """Sealed, named after its source, complete; progress on the way and READY at the end."""
    code, lines = convert_forked(source, target_of(source))
    assert (code, lines[-1]) == (EXIT_READY, {"state": "READY", "message": ""})
    total = lines[0]["files_total"]
    assert lines[:-1] == [{"files_done": done, "files_total": total} for done in range(1, total + 1)]
    manifest = Manifest.read(target_of(source))
    verify(target_of(source), manifest)
    assert manifest.source == Manifest.read(source).ref
    assert manifest.shape.any_world_size
    assert not (target_of(source) / JOURNAL).exists()
    assert [found.name for found in inventory(source.parent)] == [source.name, target_of(source).name]


@pytest.mark.parametrize("other", [False, True], ids=["ours", "upstream"])
def test_bytes_are_told_while_they_move(source: Path, monkeypatch: pytest.MonkeyPatch, other: bool) -> None:
    """The source's as it is verified, and what is written and synced; how much it will be is known before."""
    monkeypatch.setattr(upstream, "LOOK_EVERY_SECONDS", 0.01)
    moved: list[int] = []
    planned: list[tuple[int, int]] = []
    watch = Watch(moved=moved.append, planned=lambda total: planned.append((sum(moved), total)))
    convert(source, target_of(source), wish=Wish(upstream=other), watch=watch)
    read, made = Manifest.read(source).total_bytes, Manifest.read(target_of(source)).total_bytes
    linked = sum(entry.size for entry in Manifest.read(target_of(source)).files if "/" not in entry.path)
    assert moved[0] <= read < sum(moved)
    if other:
        # What DeepSpeed's converter wrote, seen from the outside, and what was then synced and read.
        assert sum(moved) > read + 2 * made
    else:
        assert sum(moved) == read + 2 * (made - linked) + linked
        ((before, total),) = planned
        assert before == read
        # Only the values are foreseen, not what torch writes around them: all there is in files of this size.
        assert total > read + linked


def flip(source: Path) -> None:
    path = source / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(source: Path) -> None:
    os.truncate(source / "mp_rank_00_model_states.pt", 100)


def lose(source: Path) -> None:
    (source / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()


def add(source: Path) -> None:
    (source / "zero_pp_rank_2_mp_rank_00_optim_states.pt").write_bytes(b"")


@pytest.mark.parametrize("damage", [flip, truncate, lose, add])
def test_damaged_source(source: Path, damage: Callable[[Path], None]) -> None:
    """Found before anything is written."""
    damage(source)
    code, message = convert_here(source, target_of(source))
    assert code == EXIT_SOURCE_BAD, message
    assert not target_of(source).exists()


def shift_weight(state: dict[str, Any]) -> None:
    state["module"]["body.weight"][0, 0] += 1e-3


def test_incomplete_source(source: Path) -> None:
    """A rank's file was never written, and the manifest does not know better."""
    reseal(source, lose)
    code, message = convert_here(source, target_of(source))
    assert code == EXIT_ENVIRONMENT
    assert "step-3.e1.0 verifies, but 2 ranks saved, optimizer files are there of ranks [1]" in message


def test_weights_that_disagree(source: Path) -> None:
    """The optimizer's weights and the model's are two copies of one thing. Whoever verifies it finds it intact."""
    reseal(source, rewrite_model(shift_weight))
    code, message = convert_here(source, target_of(source))
    assert code == EXIT_IMPOSSIBLE
    assert "step-3.e1.0 verifies, but body.weight" in message
    with pytest.raises(SourceBad, match=r"^body\.weight"):  # by hand, where nobody retires anything
        convert_directory(source, source.parent / "out")


def test_moments_missing(source: Path) -> None:
    """Without this check training would go on with Adam reset, silently."""

    def forget(directory: Path) -> None:
        for path in directory.glob("*_optim_states.pt"):
            state = load(path)
            for group in state["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
                del group["exp_avg"], group["exp_avg_sq"]
            torch.save(state, path)

    reseal(source, forget)
    code, message = convert_here(source, target_of(source))
    assert code == EXIT_IMPOSSIBLE
    assert "moments" in message


def test_round_robin_gradients(source: Path) -> None:
    """DeepSpeed's converter makes wrong weights of it without a word."""
    reseal(source, rewrite_model(lambda s: s["ds_config"]["zero_optimization"].update(round_robin_gradients=True)))
    code, message = convert_here(source, target_of(source))
    assert code == EXIT_IMPOSSIBLE
    assert "round_robin_gradients" in message


def test_no_space(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source is not to blame, nothing is sealed, and torch's own words about it are not what a person reads."""
    written = [0]
    write = os.write

    def until_full(descriptor: int, data: Any) -> int:
        written[0] += len(data)
        if written[0] > 3000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", until_full)
    code, message = convert_here(source, target_of(source))
    assert code == EXIT_ENVIRONMENT
    assert "no space left" in message
    assert not (target_of(source) / "MANIFEST.json").exists()


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "file by file"])
def test_a_power_cut_leaves_a_whole_form_or_none(source: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool) -> None:
    """At any moment: whatever has a manifest has every file and name. And at the end it is there."""
    sync_as_if(monkeypatch, at_once)
    power = Power(source.parent, monkeypatch, only_whole_checkpoints)
    convert(source, target_of(source))
    assert target_of(source).name in sealed(power.image())
    files = len(Manifest.read(target_of(source)).files)
    assert power.whole > 0 if at_once else power.syncs > files


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "file by file"])
def test_a_disk_that_fails_ends_the_conversion(source: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool) -> None:
    """It says so once, and takes everything afterwards: nothing is sealed. What it lost is in no journal."""
    sync_as_if(monkeypatch, at_once)
    said: list[bool] = []

    def fail(*arguments: Any) -> None:
        if not said:
            said.append(True)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSystem if at_once else os, "sync" if at_once else "fsync", fail)
        code, message = convert_here(source, target_of(source, 1))
    assert code == EXIT_ENVIRONMENT
    assert "Input/output error" in message
    assert not (target_of(source, 1) / "MANIFEST.json").exists()
    convert(source, target_of(source, 2), earlier=[target_of(source, 1)])
    verify(target_of(source, 2), Manifest.read(target_of(source, 2)))


def test_used_target(source: Path) -> None:
    """Each lease has a directory of its own; one that is there is never written into."""
    target_of(source).mkdir()
    code, _ = convert_here(source, target_of(source))
    assert code == EXIT_ENVIRONMENT
    assert list(target_of(source).iterdir()) == []


def test_successor_takes_over_what_is_finished(source: Path) -> None:
    """Finished files are linked, a damaged one and a torn line of the journal are not believed."""
    with pytest.raises(Died):
        convert(source, target_of(source, 1), watch=die_after(6))
    first = target_of(source, 1)
    journalled = [json.loads(line)["path"] for line in (first / JOURNAL).read_text().splitlines()[1:]]
    assert len(journalled) >= 6
    damaged = journalled[0]
    os.chmod(first / damaged, 0o644)
    with open(first / damaged, "r+b") as file:
        file.seek(100)
        file.write(b"?")
    with open(first / JOURNAL, "a") as file:
        file.write('{"path": "zero/x')
    told: list[int] = []
    convert(
        source,
        target_of(source, 2),
        earlier=[first],
        watch=Watch(progress=lambda done, total: told.append(done)),
    )
    second = target_of(source, 2)
    verify(second, Manifest.read(second))
    for path in journalled[1:]:
        assert os.path.samefile(first / path, second / path), path
    assert not os.path.samefile(first / damaged, second / damaged)
    assert told[0] == len(journalled), "taken-over files count as done"
    convert(source, target_of(source, 3))
    assert Manifest.read(second).files == Manifest.read(target_of(source, 3)).files


def test_sealed_but_never_reported(source: Path) -> None:
    """The owner died between its seal and its report: the next lease only links."""
    convert(source, target_of(source, 1))
    convert(source, target_of(source, 2), earlier=[target_of(source, 1)])
    one, two = Manifest.read(target_of(source, 1)), Manifest.read(target_of(source, 2))
    assert one.files == two.files
    assert all(os.path.samefile(target_of(source, 1) / f.path, target_of(source, 2) / f.path) for f in one.files)


@pytest.mark.parametrize("sealed", [True, False])
def test_files_of_another_source_are_not_taken(source: Path, tmp_path: Path, sealed: bool) -> None:
    """Same step saved again after a fall-back: same names, other content."""
    other = tmp_path / "step-3.e2.0"
    shutil.copytree(source, other)
    (other / "MANIFEST.json").unlink()
    (other / "note").write_text("another attempt")
    seal(other, replace(Manifest.read(source), name=other.name, epoch=2, files=describe(other, sync=False)))
    try:
        convert(source, target_of(source), watch=None if sealed else die_after(20))
    except Died:
        assert not sealed
    convert(other, target_of(other), earlier=[target_of(source)])
    names = [file.path for file in Manifest.read(target_of(other)).files if file.path.startswith("zero/")]
    assert any((target_of(source) / name).exists() for name in names)
    for name in names:
        first = target_of(source) / name
        assert not first.exists() or not os.path.samefile(first, target_of(other) / name), name


@pytest.mark.parametrize("links", [True, False], ids=["linked", "copied"])
def test_killed_and_followed(source: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    """The real thing: SIGKILL in the middle, and a second lease that makes only what is missing; also without links."""
    first, second = target_of(source, 1), target_of(source, 2)
    convert_halfway(source, first, 5)
    finished = [json.loads(line)["path"] for line in (first / JOURNAL).read_text().splitlines()[1:]]
    assert len(finished) == 5
    assert not (first / "MANIFEST.json").exists()
    if not links:

        def refuse(*arguments: Any, **options: Any) -> None:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

        monkeypatch.setattr(os, "link", refuse)
    made: list[str] = []
    monkeypatch.setattr(ConversionOutput, "_create", _noting(made, ConversionOutput._create))
    convert(source, second, earlier=[first])
    verify(second, Manifest.read(second))
    assert not set(made) & set(finished)
    for path in finished:
        assert os.path.samefile(first / path, second / path) == links
        assert (first / path).read_bytes() == (second / path).read_bytes()


def _noting(made: list[str], create: Any) -> Any:
    def noted(self: ConversionOutput, path: str) -> Any:
        made.append(path)
        return create(self, path)

    return noted


def test_standby_converts_when_told(source: Path) -> None:
    """It has imported everything before; the order comes as one line."""
    process = subprocess.Popen(
        [sys.executable, "-m", MODULE, "--standby"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=worker_environment(),
    )
    assert process.stdout is not None
    assert json.loads(process.stdout.readline()) == {"state": "WARM"}
    order = {"source": str(source), "target": str(target_of(source)), "digest": Manifest.read(source).digest}
    output, _ = process.communicate(json.dumps(order) + "\n", timeout=60)
    assert process.returncode == EXIT_READY
    assert json.loads(output.splitlines()[-1])["state"] == "READY"
    verify(target_of(source), Manifest.read(target_of(source)))


def test_standby_that_is_not_needed() -> None:
    """End of file is its dismissal."""
    converter = Rank([MODULE, "--standby"], worker_environment(), module=True)
    try:
        assert converter.wait(60) == (EXIT_READY, '{"state": "WARM"}\n')
    finally:
        converter.close()


def test_digest_is_not_the_recorded_one(source: Path) -> None:
    """A sealed directory under the right name may still not be what the master committed."""
    code, message = convert_here(source, target_of(source), digest="0" * 64)
    assert code == EXIT_SOURCE_BAD
    assert "recorded was 000000000000" in message


def test_not_a_name_for_it(source: Path) -> None:
    with pytest.raises(EnvironmentFailed, match="not a name"):
        convert(source, source.parent / "step-9.e1.0.universal.1")
    assert not (source.parent / "step-9.e1.0.universal.1").exists()


def test_ends_with_its_parent(tmp_path: Path) -> None:
    """A converter without an agent is gone within two seconds, however the agent went."""
    child = (
        "import time; from dalsegno.elastic.universal.__main__ import _end_with_parent as e; e(); print(1, flush=True)"
    )
    parent = (
        "import subprocess, sys\n"
        f"p = subprocess.Popen([sys.executable, '-c', {child + '; time.sleep(60)'!r}], stdout=subprocess.PIPE)\n"
        "p.stdout.readline(); print(p.pid, flush=True); p.wait()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    process.wait(timeout=10)
    deadline = time.monotonic() + 2.0
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    gone = not alive(pid)
    if not gone:
        os.kill(pid, signal.SIGKILL)
    assert gone


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_imports_neither_torch_nor_deepspeed() -> None:
    """An agent without the extra can import the package, and damage is told in a fraction of a second."""
    code = "import sys, dalsegno.elastic.universal; sys.exit(bool({'torch', 'deepspeed'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
