"""A conversion as a process of its own: what it makes, how it fails, and that it dies and is followed by another."""

from __future__ import annotations

import json
import os
import resource
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
from dalsegno.elastic.universal import EXIT_ENVIRONMENT, EXIT_READY, EXIT_SOURCE_BAD, EnvironmentFailed, convert
from dalsegno.elastic.universal.journal import JOURNAL
from dalsegno.elastic.universal.loading import load
from tests.support.zero_runs import Sources, seal_sharded, worker_environment

pytestmark = pytest.mark.timeout(180)
COMMAND = [sys.executable, "-m", "dalsegno.elastic.universal"]


@pytest.fixture
def source(sources: Sources, tmp_path: Path) -> Path:
    """A ZeRO-2 checkpoint of two ranks that the test may damage."""
    made, _ = sources.get(2, 2)
    shutil.copytree(made, tmp_path / made.name)
    return tmp_path / made.name


def target_of(source: Path, lease: int = 1) -> Path:
    return source.parent / f"{source.name}.universal.{lease}"


def run(source: Path, target: Path, *more: str, **options: Any) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and the lines of standard output, those of bytes aside: how many there are is a matter of time."""
    command = [*COMMAND, "--source", str(source), "--target", str(target), *more]
    options.setdefault("env", worker_environment())
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return done.returncode, [line for line in lines if "bytes_done" not in line]


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
    code, lines = run(source, target_of(source))
    assert (code, lines[-1]) == (EXIT_READY, {"state": "READY", "message": ""})
    total = lines[0]["files_total"]
    assert lines[:-1] == [{"files_done": done, "files_total": total} for done in range(1, total + 1)]
    manifest = Manifest.read(target_of(source))
    verify(target_of(source), manifest)
    assert manifest.source == Manifest.read(source).ref
    assert manifest.shape.any_world_size
    assert not (target_of(source) / JOURNAL).exists()
    assert [found.name for found in inventory(source.parent)] == [source.name, target_of(source).name]


@pytest.mark.parametrize("more", [(), ("--upstream",)], ids=["ours", "upstream"])
def test_bytes_are_told_while_they_move(source: Path, more: tuple[str, ...]) -> None:
    """The source's as it is verified, and what is written and synced; the sum only grows."""
    program = (
        "import sys; from dalsegno.elastic.universal import __main__, upstream;"
        " __main__.BYTES_EVERY = 0.0; upstream.LOOK_EVERY = 0.01; sys.exit(__main__.main())"
    )
    command = [sys.executable, "-c", program, "--source", str(source), "--target", str(target_of(source)), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=worker_environment())
    told = [line["bytes_done"] for line in map(json.loads, done.stdout.splitlines()) if "bytes_done" in line]
    assert told == sorted(told)
    read, made = Manifest.read(source).total_bytes, Manifest.read(target_of(source)).total_bytes
    linked = sum(entry.size for entry in Manifest.read(target_of(source)).files if "/" not in entry.path)
    assert told[0] <= read < told[-1]
    if more:
        # What DeepSpeed's converter wrote, seen from the outside, and what was then synced and read.
        assert told[-1] > read + 2 * made
    else:
        assert told[-1] == read + 2 * (made - linked) + linked


@pytest.mark.parametrize(("stage", "world"), [(1, 3), (2, 2), (3, 3)])
def test_same_files_as_deepspeeds_own_converter(sources: Sources, tmp_path: Path, stage: int, world: int) -> None:
    """Ours and theirs agree file by file and bit by bit."""
    made, _ = sources.get(stage, world)
    source = tmp_path / made.name
    shutil.copytree(made, source)
    assert run(source, target_of(source, 1))[0] == EXIT_READY
    assert run(source, target_of(source, 2), "--upstream")[0] == EXIT_READY
    ours, theirs = target_of(source, 1), target_of(source, 2)
    paths = [entry.path for entry in Manifest.read(ours).files]
    assert paths == [entry.path for entry in Manifest.read(theirs).files]
    for path in paths:
        if path != "zero/optimizer_state.pt":
            assert_equal(load(ours / path), load(theirs / path), path)
    mine, other = load(ours / "zero/optimizer_state.pt"), load(theirs / "zero/optimizer_state.pt")
    assert set(mine) == set(other) - {"fp32_flat_groups"}
    assert_equal(mine["param_groups"], other["param_groups"], "param_groups")


def assert_equal(one: Any, two: Any, where: str) -> None:
    assert type(one) is type(two), where
    if isinstance(one, torch.Tensor):
        assert one.dtype == two.dtype, where
        assert torch.equal(one, two), where
    elif isinstance(one, dict):
        assert list(one) == list(two), where
        for key in one:
            assert_equal(one[key], two[key], f"{where}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(two), where
        for index, (left, right) in enumerate(zip(one, two, strict=True)):
            assert_equal(left, right, f"{where}/{index}")
    elif type(one).__module__ == "builtins":
        assert one == two, where


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
    code, lines = run(source, target_of(source))
    assert (code, lines[-1]["state"]) == (EXIT_SOURCE_BAD, "SOURCE_BAD")
    assert not target_of(source).exists()


def shift_weight(state: dict[str, Any]) -> None:
    state["module"]["body.weight"][0, 0] += 1e-3


def test_incomplete_source(source: Path) -> None:
    """A rank's file was never written, and the manifest does not know better."""
    reseal(source, lose)
    code, lines = run(source, target_of(source))
    assert code == EXIT_SOURCE_BAD
    assert "optimizer files are there of ranks [1]" in lines[-1]["message"]


def test_weights_that_disagree(source: Path) -> None:
    """The optimizer's weights and the model's are two copies of one thing."""
    reseal(source, rewrite_model(shift_weight))
    code, lines = run(source, target_of(source))
    assert code == EXIT_SOURCE_BAD
    assert "body.weight" in lines[-1]["message"]


def test_moments_missing(source: Path) -> None:
    """Without this check training would go on with Adam reset, silently."""

    def forget(directory: Path) -> None:
        for path in directory.glob("*_optim_states.pt"):
            state = load(path)
            for group in state["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
                del group["exp_avg"], group["exp_avg_sq"]
            torch.save(state, path)

    reseal(source, forget)
    code, lines = run(source, target_of(source))
    assert code == EXIT_SOURCE_BAD
    assert "moments" in lines[-1]["message"]


def test_round_robin_gradients(source: Path) -> None:
    """DeepSpeed's converter makes wrong weights of it without a word."""
    reseal(source, rewrite_model(lambda s: s["ds_config"]["zero_optimization"].update(round_robin_gradients=True)))
    code, lines = run(source, target_of(source))
    assert code == EXIT_ENVIRONMENT
    assert "round_robin_gradients" in lines[-1]["message"]


def test_no_space(source: Path) -> None:
    """A limit on the size of files stands in for a full disk: the source is not to blame, nothing is sealed."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    code, lines = run(source, target_of(source), preexec_fn=limit)
    assert (code, lines[-1]["state"]) == (EXIT_ENVIRONMENT, "ENVIRONMENT")
    assert not (target_of(source) / "MANIFEST.json").exists()


def test_used_target(source: Path) -> None:
    """Each lease has a directory of its own; one that is there is never written into."""
    target_of(source).mkdir()
    code, _ = run(source, target_of(source))
    assert code == EXIT_ENVIRONMENT
    assert list(target_of(source).iterdir()) == []


class Died(BaseException):
    """Ends a conversion in the middle, as a kill would: no handler of ours sees it."""


def die_after(files: int) -> Callable[[int, int], None]:
    def progress(done: int, total: int) -> None:
        if done == files:
            raise Died

    return progress


def test_successor_takes_over_what_is_finished(source: Path) -> None:
    """Finished files are linked, a damaged one and a torn line of the journal are not believed."""
    with pytest.raises(Died):
        convert(source, target_of(source, 1), progress=die_after(6))
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
    code, lines = run(source, target_of(source, 2), "--earlier", str(first))
    assert code == EXIT_READY
    second = target_of(source, 2)
    verify(second, Manifest.read(second))
    for path in journalled[1:]:
        assert os.path.samefile(first / path, second / path), path
    assert not os.path.samefile(first / damaged, second / damaged)
    assert lines[0]["files_done"] == len(journalled), "taken-over files count as done"
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
        convert(source, target_of(source), progress=None if sealed else die_after(20))
    except Died:
        assert not sealed
    convert(other, target_of(other), earlier=[target_of(source)])
    names = [file.path for file in Manifest.read(target_of(other)).files if file.path.startswith("zero/")]
    assert any((target_of(source) / name).exists() for name in names)
    for name in names:
        first = target_of(source) / name
        assert not first.exists() or not os.path.samefile(first, target_of(other) / name), name


def test_killed_and_followed(source: Path) -> None:
    """The real thing: SIGKILL at the first sign of progress, and a second process that finishes."""
    command = [*COMMAND, "--source", str(source), "--target", str(target_of(source, 1))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=worker_environment())
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    assert run(source, target_of(source, 2), "--earlier", str(target_of(source, 1)))[0] == EXIT_READY
    verify(target_of(source, 2), Manifest.read(target_of(source, 2)))


def standby() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [*COMMAND, "--standby"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=worker_environment()
    )
    assert process.stdout is not None
    assert json.loads(process.stdout.readline()) == {"state": "WARM"}
    return process


def test_standby_converts_when_told(source: Path) -> None:
    """It has imported everything before; the order comes as one line."""
    process = standby()
    order = {"source": str(source), "target": str(target_of(source)), "digest": Manifest.read(source).digest}
    output, _ = process.communicate(json.dumps(order) + "\n", timeout=60)
    assert process.returncode == EXIT_READY
    assert json.loads(output.splitlines()[-1])["state"] == "READY"
    verify(target_of(source), Manifest.read(target_of(source)))


def test_standby_that_is_not_needed() -> None:
    """End of file is its dismissal."""
    process = standby()
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (EXIT_READY, "")


def test_digest_is_not_the_recorded_one(source: Path) -> None:
    """A sealed directory under the right name may still not be what the master committed."""
    code, lines = run(source, target_of(source), "--digest", "0" * 64)
    assert code == EXIT_SOURCE_BAD
    assert "recorded was 000000000000" in lines[-1]["message"]


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
