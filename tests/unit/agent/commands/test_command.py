"""`dalsegno`: what it says of checkpoints and of the installation, and its exit codes."""

from __future__ import annotations

import configparser
import fcntl
import importlib.metadata
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from dalsegno.agent.commands import dalsegno, doctor
from dalsegno.agent.dlrover.claims import NameClaim
from dalsegno.agent.dlrover.names import segments, sockets
from dalsegno.agent.processes.own_directory import claim
from dalsegno.agent.workers import socket_place
from dalsegno.elastic.checkpoint import Best, LocalLock
from dalsegno.elastic.universal import EnvironmentFailed
from dalsegno.elastic.universal.journal import Journal
from dalsegno.elastic.universal.readers import reading
from tests.support.pages.sources import ROOT
from tests.unit.agent.storage.test_storage import make_checkpoint

Output = pytest.CaptureFixture[str]


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """A checkpoint directory: a finished run of one checkpoint, and one with a sealed and an unsealed one."""
    make_checkpoint(tmp_path / "job" / "run-0001", "step-3.e1.1")
    (tmp_path / "job" / "run-0001" / "FINISHED.json").write_text("{}")
    make_checkpoint(tmp_path / "job" / "run-0002", "step-5.e2.1")
    (tmp_path / "job" / "run-0002" / "step-6.e2.1").mkdir()
    (tmp_path / ".dalsegno" / "job").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        *(["checkpoints", name, ""] for name in ("ls", "verify", "show")),
        ["checkpoints", "prune", "--keep=1", ""],
        ["convert", "", "there"],
        ["convert", "here", ""],
        ["pauses", ""],
        ["doctor", ""],
        ["render", "k8s", ""],
        ["render", "k8s", "--output=", "job.yaml"],
        ["render", "k8s", "--base=", "job.yaml"],
        *(["status", f"--{name}="] for name in ("checkpoint-dir", "token-file", "tls-ca", "tls-cert", "tls-key")),
    ],
)
def test_an_empty_name_is_not_the_working_directory(
    arguments: list[str], checkpoints: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    """As of a variable of the shell that is not set: what lies in the working directory was listed, and deleted."""
    monkeypatch.chdir(checkpoints)
    assert dalsegno.run(arguments) == 2
    said = capsys.readouterr()
    assert said.err.startswith("dalsegno: error: argument ")
    assert "the name is empty: is a variable unset?" in said.err
    assert said.out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        *(["checkpoints", name] for name in ("ls", "verify", "show")),
        ["checkpoints", "prune", "--keep=1"],
        ["convert"],
        *(["pauses"], ["doctor"], ["doctor", "--dlrover"], ["relay"], ["relay", "verify"], ["render", "k8s"]),
        *(["status", f"--{name}"] for name in ("checkpoint-dir", "token-file", "tls-ca")),
    ],
)
def test_a_name_that_no_file_can_have_is_said_to_be_so(
    arguments: list[str], checkpoints: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    """In one line: `Path.is_dir` raises where the system does, as it does in a directory of somebody else."""
    monkeypatch.chdir(checkpoints)
    of_a_master = arguments[-1] in ("--token-file", "--tls-ca")
    there = ["there"] if arguments[0] == "convert" else ["--master=h:1"] if of_a_master else []
    assert dalsegno.run([*arguments, "n" * 300, *there]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert "n" * 300 in said.err


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
def test_a_closed_directory_holds_no_marks_that_can_be_seen(tmp_path: Path) -> None:
    """It was said that no change of the world is in it."""
    (tmp_path / "traces").mkdir(mode=0o000)
    drops = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]
    done = subprocess.run(
        [*drops, sys.executable, "-m", "dalsegno.agent.commands.dalsegno", "pauses", str(tmp_path / "traces")],
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        timeout=60,
    )
    error = f"[Errno 13] Permission denied: '{tmp_path / 'traces'}'"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"dalsegno: error: {error}\n")


# ---- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("below", ["", "job", "job/run-0002"])
def test_ls_finds_the_runs_from_any_level(checkpoints: Path, capsys: Output, below: str) -> None:
    """Each run with its checkpoints, their form and shape; what is not sealed, and why it does not count."""
    assert dalsegno.run(["checkpoints", "ls", str(checkpoints / below)]) == 0
    lines = capsys.readouterr().out.splitlines()
    run = lines.index(str(checkpoints / "job" / "run-0002"))
    assert lines[run + 1].split(", ")[:2] == ["  step-5.e2.1  sharded", "ddp"]
    assert lines[run + 2].startswith("  step-6.e2.1  not usable: ")
    assert (f"{checkpoints}/job/run-0001 (finished)" in lines) == (below != "job/run-0002")
    assert not any(".dalsegno" in line for line in lines)


@pytest.mark.parametrize("action", ["ls", "verify"])
def test_an_empty_directory_says_so(tmp_path: Path, capsys: Output, action: str) -> None:
    """Silence could be taken for "all is well"; a directory that does not exist is bad usage."""
    assert dalsegno.run(["checkpoints", action, str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no checkpoints in {tmp_path}\n"
    assert dalsegno.run(["checkpoints", action, str(tmp_path / "nothing")]) == 2
    assert capsys.readouterr().err == f"dalsegno: error: {tmp_path / 'nothing'} is no directory\n"


def test_verify_reads_every_byte(checkpoints: Path, capsys: Output) -> None:
    """A flipped bit is named with its file and makes the exit code 1; unsealed ones cannot be intact either."""
    sound, bad = (checkpoints / "job" / name for name in ("run-0001/step-3.e1.1", "run-0002/step-5.e2.1"))
    assert dalsegno.run(["checkpoints", "verify", str(sound)]) == 0
    assert capsys.readouterr().out == f"{sound}: intact\n"
    (bad / "model.pt").write_bytes(b"wEights")
    assert dalsegno.run(["checkpoints", "verify", str(checkpoints)]) == 1
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == f"{sound}: intact"
    assert second.startswith(f"{bad}: ")
    assert "model.pt" in second
    assert third.startswith(f"{bad.parent / 'step-6.e2.1'}: ")


def test_show_prints_the_manifest_and_its_digest(checkpoints: Path, capsys: Output) -> None:
    """As JSON; of what is not sealed there is none."""
    path = checkpoints / "job" / "run-0002" / "step-5.e2.1"
    assert dalsegno.run(["checkpoints", "show", str(path)]) == 0
    *text, digest = capsys.readouterr().out.splitlines()
    manifest = dalsegno.Manifest.read(path)
    assert json.loads("\n".join(text)) == json.loads(manifest.to_bytes())
    assert digest == f"digest {manifest.digest}"
    assert dalsegno.run(["checkpoints", "show", str(path.parent / "step-6.e2.1")]) == 2
    assert "is no sealed checkpoint" in capsys.readouterr().err


def names(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob("step-*"))


def prune(directory: Path, *flags: str) -> int:
    return dalsegno.run(["checkpoints", "prune", str(directory), *flags])


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """A finished run of four checkpoints, the second of which is the best, and one that was never sealed."""
    run = tmp_path / "job" / "run-0001"
    best = Best("step-2.e1.1", "loss", "min", 0.5)
    for step in (1, 2, 3, 4):
        make_checkpoint(run, f"step-{step}.e1.1", best=best if step > 1 else None, metric=1.0 / step)
    (run / "step-5.e1.1").mkdir()
    (run / "FINISHED.json").write_text("{}")
    return run


def test_prune_keeps_the_newest_and_the_best(finished: Path, capsys: Output) -> None:
    """A dry run says the same and deletes nothing; `ls` marks the best; what was never sealed goes too."""
    assert prune(finished, "--keep=1", "--dry-run") == 0
    dry = capsys.readouterr().out.splitlines()
    assert dry == [f"{finished}: would delete 3", "  step-1.e1.1", "  step-3.e1.1", "  step-5.e1.1"]
    assert len(names(finished)) == 5
    assert prune(finished, "--keep=1") == 0
    assert capsys.readouterr().out.splitlines() == [f"{finished}: deleted 3", *dry[1:]]
    assert names(finished) == ["step-2.e1.1", "step-4.e1.1"]
    assert dalsegno.run(["checkpoints", "ls", str(finished)]) == 0
    best, newest = capsys.readouterr().out.splitlines()[1:]
    assert best.endswith("MB, metric 0.5, best loss (min)")
    assert newest.endswith("MB, metric 0.25")


def test_prune_keeps_what_is_sound(finished: Path, capsys: Output) -> None:
    """A damaged newest is none of those kept: it is named and stays, the one before it too."""
    shard = next(path for path in (finished / "step-4.e1.1").iterdir() if path.name != "MANIFEST.json")
    shard.write_bytes(bytes(shard.stat().st_size))
    assert prune(finished, "--keep=1") == 0
    said = capsys.readouterr().out
    assert "step-4.e1.1: it does not count as one that is kept: " in said
    assert names(finished) == ["step-2.e1.1", "step-3.e1.1", "step-4.e1.1"]
    assert prune(finished, "--keep=3") == 0
    assert names(finished) == ["step-2.e1.1", "step-3.e1.1", "step-4.e1.1"]


def test_prune_leaves_alone_what_others_decide(finished: Path, capsys: Output) -> None:
    """A live job, a training at work, two runs in one directory: nothing is deleted, one line says why; exit code 1."""
    before = names(finished)
    with LocalLock(finished):
        assert prune(finished, "--keep=1") == 1
    assert "in use by another training" in capsys.readouterr().out
    (finished / "FINISHED.json").unlink()
    assert prune(finished, "--keep=1") == 1
    assert "job job has not finished it, and prunes it itself" in capsys.readouterr().out
    make_checkpoint(finished, "step-9.e1.1", run_id="run-0002")
    assert prune(finished.parent.parent, "--keep=1") == 1
    assert "several runs" in capsys.readouterr().out
    assert names(finished) == [*before, "step-9.e1.1"]
    assert prune(finished, "--keep=0") == 2
    assert prune(finished) == 2


@pytest.mark.parametrize("name", ["run-0001", "run-0002"])
def test_prune_spares_the_first_save_of_a_run(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Nothing is sealed yet, so no manifest says whose run it is. By its own name, a path below it, or a link."""
    make_checkpoint(tmp_path / "job" / "run-0001", "step-3.e1.1")
    run = tmp_path / "job" / name
    (run / "step-4.e2.1").mkdir(parents=True)
    if name == "run-0001":
        shutil.rmtree(run / "step-3.e1.1")
    else:
        (tmp_path / "job" / "run-0001" / "FINISHED.json").write_text("{}")
    (tmp_path / "link").symlink_to(run)
    monkeypatch.chdir(run)
    for given in (tmp_path, run, Path(), tmp_path / "link"):
        assert prune(given, "--keep=1") == 1
        assert "job job has not finished it, and prunes it itself" in capsys.readouterr().out
    assert names(run) == ["step-4.e2.1"]
    (run / "FINISHED.json").write_text("{}")
    assert prune(run, "--keep=1") == 0
    assert names(run) == []


def test_prune_deletes_what_a_run_without_a_job_has_given_up(tmp_path: Path) -> None:
    """Also where it has sealed nothing: who has its lock may."""
    (tmp_path / "mine" / "step-4.e2.1").mkdir(parents=True)
    assert prune(tmp_path, "--keep=1") == 0
    assert names(tmp_path / "mine") == []


def test_prune_spares_what_a_conversion_uses(finished: Path, capsys: Output) -> None:
    """One that somebody has begun by hand; when it has ended, or died, nothing holds it."""
    target = finished / "step-1.e1.1.universal.7"
    target.mkdir()
    with Journal(target, source_digest="d"):
        assert prune(finished, "--keep=1") == 0
        assert f"{finished / 'step-1.e1.1'}: in use by a conversion, stays" in capsys.readouterr().out
        assert names(finished) == ["step-1.e1.1", "step-1.e1.1.universal.7", "step-2.e1.1", "step-4.e1.1"]
    assert prune(finished, "--keep=1") == 0
    assert names(finished) == ["step-2.e1.1", "step-4.e1.1"]


@pytest.mark.parametrize("name", ["step-1.e1.1", "step-1.e1.1/global_step1", "step-5.e1.1", "link"])
def test_prune_spares_what_a_conversion_reads(finished: Path, tmp_path: Path, capsys: Output, name: str) -> None:
    """Wherever it writes to. Sealed or not, from a part of it, and under another name."""
    (tmp_path / "link").symlink_to(finished / "step-1.e1.1")
    stays = name.partition("/")[0] if name != "link" else "step-1.e1.1"
    with reading(tmp_path / "link" if name == "link" else finished / name):
        assert prune(finished, "--keep=1") == 0
        assert f"{finished / stays}: in use by a conversion, stays" in capsys.readouterr().out
        assert names(finished) == sorted([stays, "step-2.e1.1", "step-4.e1.1"])
    assert prune(finished, "--keep=1") == 0
    assert names(finished) == ["step-2.e1.1", "step-4.e1.1"]


@pytest.mark.parametrize("name", ["step-1.e1.1", "step-5.e1.1"])
def test_no_conversion_begins_with_what_is_being_deleted(finished: Path, name: str) -> None:
    path = finished / name
    held = path / "MANIFEST.json" if name == "step-1.e1.1" else path
    descriptor = os.open(held, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(EnvironmentFailed, match="is just being deleted"), reading(path):
        pass
    os.close(descriptor)
    with reading(path), reading(path):
        pass


# ---- doctor ---------------------------------------------------------------------------------------------------------


def without(monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
    """As if exactly these packages were not installed."""

    def version(name: str) -> str:
        if name in missing:
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.2"

    monkeypatch.setattr(importlib.metadata, "version", version)


def owned_by(monkeypatch: pytest.MonkeyPatch, *owners: str) -> None:
    """As if these distributions each declared dlrover-run."""
    points = [SimpleNamespace(name="dlrover-run", dist=SimpleNamespace(name=owner)) for owner in owners]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)


def test_doctor_knows_what_setup_cfg_declares() -> None:
    """Every package of the base install and of every extra but the developers'."""
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")

    def names(listing: str) -> set[str]:
        lines = (line.split("#")[0] for line in listing.splitlines())
        return {line.split(">")[0].split("=")[0].strip() for line in lines if line.strip()}

    declared = {extra: names(listing) for extra, listing in config["options.extras_require"].items() if extra != "dev"}
    declared[""] = names(config["options"]["install_requires"])
    assert {extra: set(packages) for extra, packages in doctor.PARTS.items()} == declared


def test_doctor_finds_nothing_wrong(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    """A missing extra is no trouble, and named; so is a variable that leads commands elsewhere."""
    without(monkeypatch, "fastapi")
    owned_by(monkeypatch, "dalsegno")
    monkeypatch.setenv("DLROVER_MASTER_ADDR", "host:1")
    assert dalsegno.run(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "torch: 1.2" in lines
    assert "fastapi: missing (extra: pip install 'dalsegno[http]')" in lines
    assert "DLROVER_MASTER_ADDR is set: host:1" in lines
    assert any(line.startswith("dlrover-run: ") and line.endswith(", of dalsegno") for line in lines)
    assert any(line.startswith("dlrover-master: ") and line.endswith(", of nobody") for line in lines)


def test_doctor_removes_what_dead_agents_left_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    """No agent may start here for long; of somebody else's directory it says so."""
    root = tmp_path / "root"
    (root / "job" / "0123").mkdir(parents=True)
    root.chmod(0o700)
    (root / "job" / "0123" / "file").write_bytes(bytes(3_000_000))
    monkeypatch.setattr(doctor, "root_of_user", lambda: root)
    dalsegno.run(["doctor"])
    assert f"{root}/job/0123: 3 MB that an agent which is gone had in memory; removed" in capsys.readouterr().out
    root.chmod(0o777)
    dalsegno.run(["doctor"])
    assert "memory checkpoints: " in capsys.readouterr().out
    assert list(root.iterdir()) == []


def test_doctor_removes_directories_that_dead_agents_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    """Those of living ones stay."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(socket_place, "_SHORT_DIRECTORIES", ())
    left = tmp_path / "dalsegno-1234"
    left.mkdir(mode=0o700)
    descriptor = claim(left)
    assert descriptor is not None
    dalsegno.run(["doctor"])
    assert left.exists()
    os.close(descriptor)
    dalsegno.run(["doctor"])
    assert f"{left}: of an agent that is gone; removed" in capsys.readouterr().out
    assert not left.exists()


def test_doctor_finds_a_hole_in_the_base_install(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    """Nothing works without it: exit code 1."""
    without(monkeypatch, "grpcio")
    owned_by(monkeypatch, "dalsegno")
    assert dalsegno.run(["doctor"]) == 1
    assert "grpcio: missing" in capsys.readouterr().out.splitlines()


def test_doctor_finds_two_owners_of_a_script(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    """DLRover's package has a dlrover-run too: exit code 1, and what to call instead."""
    without(monkeypatch)
    owned_by(monkeypatch, "dalsegno", "dlrover")
    assert dalsegno.run(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "of dalsegno, dlrover\n" in text
    assert "dalsegno-run" in text.split("of dalsegno, dlrover\n")[1].splitlines()[0]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--dlrover"], "--dlrover"),
        (["--timeout=-3", "-m", "--nproc-per-node=-7"], "--nproc-per-node, --timeout, --module"),
    ],
)
def test_a_doctor_without_a_script_takes_no_flags_of_one(flags: list[str], named: str, capsys: Output) -> None:
    """Whoever gave them forgot the script."""
    assert dalsegno.run(["doctor", *flags]) == 2
    assert capsys.readouterr() == (
        "",
        f"dalsegno: error: {named} without a script: name the SCRIPT that is to be examined\n",
    )


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_output_in_another_encoding(tmp_path: Path, encoding: str) -> None:
    """What the encoding lacks is escaped, also in a file's name that is no UTF-8; what it has stays."""
    for name in ("ck-ü", os.fsdecode(b"ck-\xff")):
        make_checkpoint(tmp_path / name / "run-0001", "step-3.e1.1")
        done = subprocess.run(
            [sys.executable, "-m", "dalsegno.agent.commands.dalsegno", "checkpoints", "ls", name],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONIOENCODING": encoding,
                "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
            },
            capture_output=True,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, b"")
        assert name.encode(encoding, "backslashreplace") in done.stdout


def test_doctor_removes_what_flash_checkpoint_left(capsys: Output) -> None:
    """Of an agent that was killed with its keeper. One that lives keeps its own."""
    job = f"doctor-{secrets.token_hex(4)}"
    dead, living = NameClaim(job), NameClaim(job)
    segment = Path(f"{segments(dead.name)}0")
    segment.touch()
    os.close(dead._owner)
    os.close(dead._directory)
    dalsegno.run(["doctor"])
    said = capsys.readouterr().out
    assert f"{job}: sockets and memory of Flash Checkpoint that an agent which is gone has left; removed" in said
    assert living.name not in said
    assert not segment.exists()
    assert Path(sockets(living.name)).exists()
    living.close()


@pytest.mark.parametrize(
    ("text", "module", "runs"),
    [
        ("open('ckpt.pt', 'w')", "faraway.train", False),
        ("open('ckpt.pt', 'w')", "faraway", False),
        ("import dalsegno.elastic", "faraway.train", True),
        ("import dalsegno.elastic", "faraway", True),
        ("import dalsegno.elastic", "faraway.nothing", False),
        ("import dalsegno.elastic", "faraway.train.nothing", False),
    ],
)
def test_doctor_runs_no_module_without_a_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output, text: str, module: str, runs: bool
) -> None:
    """Also one that is installed, or on PYTHONPATH, which was run to its end. To find it imports nothing of it."""
    package = tmp_path / "site" / "faraway"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    for name in ("train.py", "__main__.py"):
        (package / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.chdir(tmp_path)
    commands: list[list[str]] = []
    monkeypatch.setattr(doctor, "_run", lambda command, directory, seconds: (commands.append(command) or 0, []))
    assert dalsegno.run(["doctor", "-m", module]) == 1
    assert bool(commands) == runs
    why = "there is no module of that name" if "nothing" in module else "nothing in it names dalsegno.elastic"
    said = capsys.readouterr().out
    assert (f"{module} was not run: {why}" in said) != runs
    assert (f"`dalsegno doctor --timeout=S -m {module}` runs it" in said) != runs
    assert dalsegno.run(["doctor", "--timeout=1", "-m", module]) == 1
    assert len(commands) == 1 + runs


@pytest.mark.parametrize("arguments", [["-m", "nothing.at.all"], ["--timeout=1", "-m", "nothing"]])
def test_doctor_looks_for_the_module_first(arguments: list[str], capsys: Output) -> None:
    """It was said that nothing in it names dalsegno.elastic."""
    assert dalsegno.run(["doctor", *arguments]) == 2
    assert capsys.readouterr().err == f"dalsegno: error: there is no module nothing (-m {arguments[-1]})\n"


def test_doctor_takes_a_directory_as_python_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    """By its `__main__.py`. It was said not to exist."""
    monkeypatch.chdir(tmp_path)
    Path("train").mkdir()
    for flags in ([], ["--dlrover"]):
        assert dalsegno.run(["doctor", *flags, "train"]) == 2
        assert "the script train is a directory without a __main__.py" in capsys.readouterr().err
    Path("train", "__main__.py").write_text("print()")
    assert dalsegno.run(["doctor", "train"]) == 1
    assert "train was not run: nothing in it names dalsegno.elastic" in capsys.readouterr().out
    Path("train", "__main__.py").write_text("import dlrover")
    assert dalsegno.run(["doctor", "--dlrover", "train"]) == 0
    assert "it gets DLRover's variables" in capsys.readouterr().out
    with zipfile.ZipFile("train.pyz", "w") as archive:
        archive.writestr("__main__.py", "import dlrover")
    assert dalsegno.run(["doctor", "--dlrover", "train.pyz"]) == 2
    assert "--dlrover reads a script's file, not an archive" in capsys.readouterr().err


def test_what_doctor_advises_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    """Flags behind the script's name are the script's: with --timeout there it was told the same again."""
    monkeypatch.chdir(tmp_path)
    Path("plain script.py").write_text("raise KeyError('RANK')")
    monkeypatch.setattr(doctor, "_run", lambda command, directory, seconds: (1, []))
    assert dalsegno.run(["doctor", "plain script.py", "--timeout=1"]) == 1
    said = capsys.readouterr().out
    assert "; `dalsegno doctor --timeout=S 'plain script.py' --timeout=1` runs it for S seconds\n" in said
    assert dalsegno.run(["doctor", "--timeout=9", "plain script.py", "--lr=1"]) == 1
    torchrun = "`dalsegno doctor --nproc-per-node=1 --timeout=9 'plain script.py' --lr=1`"
    assert f"if it lacks RANK, it needs torchrun: {torchrun}\n" in capsys.readouterr().out
    assert dalsegno.run(["doctor", "--nproc-per-node=1", "--timeout=9", "plain script.py"]) == 1
    assert "torchrun" not in capsys.readouterr().out
    assert dalsegno.run(["doctor", "--nproc-per-node=2", "plain script.py"]) == 1
    assert "`dalsegno doctor --nproc-per-node=2 --timeout=S 'plain script.py'` runs it" in capsys.readouterr().out
    assert dalsegno.run(["doctor", "--dlrover", "plain script.py"]) == 0
    assert "if a module of yours does, say so with --dlrover of dlrover-run\n" in capsys.readouterr().out
