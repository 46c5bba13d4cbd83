"""`dalsegno render` reads a file, prints or writes, and says in one line each what is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dalsegno.agent.commands.dalsegno import run
from dalsegno.agent.deploy.refusals import TARGETS
from dalsegno.protos.yaml_text import documents, printed
from tests.support.deploy import GPT
from tests.unit.agent.deploy.test_elasticjob import elastic_job

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(printed([GPT]))
    return path


def test_all_three_are_printed(file: Path, capsys: Captured) -> None:
    """Objects, a script, or units with their names above them; nothing on stderr."""
    for target, begin in (
        ("k8s", "apiVersion: v1\nkind: Service"),
        ("slurm", "#!/bin/bash"),
        ("systemd", "# gpt.service"),
    ):
        assert run(["render", target, str(file)]) == 0
        said = capsys.readouterr()
        assert (said.out.startswith(begin), said.err) == (True, "")


def test_files_are_written(file: Path, tmp_path: Path, capsys: Captured) -> None:
    """Below a directory that need not exist, named after what they hold."""
    assert run(["render", "systemd", str(file), "--output", str(tmp_path / "a" / "b")]) == 0
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == ["gpt-master.service", "gpt.service"]
    assert "gpt.service" in capsys.readouterr().out


def test_keys_of_the_command_line_win(file: Path, capsys: Captured) -> None:
    """Also below another key, where the rest stays."""
    line = ["render", "k8s", str(file), "--set", "nnodes=2:3", "-s", "secrets.tls=gpt-tls", "-s", "master.port=30000"]
    assert run(line) == 0
    out = capsys.readouterr().out
    assert "--nnodes=2:3" in out
    assert "secretName: gpt-tls" in out
    assert "secretName: gpt-token" in out
    assert "--master=gpt-master:30000" in out


def test_every_refusal_has_its_line(file: Path, capsys: Captured) -> None:
    """All of them at once, with the file's name; nothing is printed or written."""
    file.write_text(printed([{**GPT, "claim": None, "secrets": None, "image": None}]))
    assert run(["render", "k8s", str(file)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert [line.split(": ")[3] for line in said.err.splitlines()] == ["secrets.token", "image", "claim"]
    assert all(line.startswith(f"dalsegno: error: {file}: ") for line in said.err.splitlines())


def test_an_elastic_job_is_rendered(file: Path, capsys: Captured) -> None:
    """What is left out of it is said on stderr, so that a pipe to kubectl gets objects alone."""
    file.write_text(printed([elastic_job()]))
    line = ["render", "k8s", str(file)]
    assert run(line) == 2
    assert "claim: missing" in capsys.readouterr().err
    assert run([*line, "--set", "claim=checkpoints", "--set", "secrets.token=token"]) == 0
    said = capsys.readouterr()
    assert {one["kind"] for one in documents(said.out, "out")} >= {"Job", "StatefulSet"}
    assert "exec dalsegno-run" in said.out
    assert "`dlrover-run` became `dalsegno-run`" in said.err


@pytest.mark.parametrize(
    ("text", "more", "line"),
    [
        ("a: 1\n---\nb: 2", [], "2 documents: one job is what can be rendered at a time"),
        ("", [], "0 documents"),
        ("kind: PyTorchJob", [], "kind: PyTorchJob: a job of our own has no kind"),
        ("- a", [], "the file: ['a'] is no mapping"),
        ("a: [", [], "this is no YAML"),
        ("name: a", ["--set", "claim"], "--set claim: write KEY=VALUE"),
        (printed([GPT]), ["--base", "base.yaml"], "--base is for k8s, together with --output"),
    ],
)
def test_what_is_no_job_is_one_line(file: Path, capsys: Captured, text: str, more: list[str], line: str) -> None:
    """Exit code 2."""
    file.write_text(text)
    assert run(["render", "k8s", str(file), *more]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert line in said


def test_files_that_cannot_be_read_are_one_line(tmp_path: Path, capsys: Captured) -> None:
    """Missing, binary, or far too large."""
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "large").write_bytes(b"#" * (2 << 20))
    for name, line in (("none", "No such file"), ("binary", "this is no text"), ("large", "this is no job")):
        assert run(["render", "k8s", str(tmp_path / name)]) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert line in said


def test_where_nothing_can_be_written_is_one_line(file: Path, tmp_path: Path, capsys: Captured) -> None:
    """A file of that name is there."""
    (tmp_path / "there").write_text("")
    for where in (tmp_path / "there", tmp_path / "there" / "below"):
        assert run(["render", "slurm", str(file), "--output", str(where)]) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert f"--output {where}: cannot write there: " in said
        assert "name a directory" in said


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"flags": ["--node-timout=20"]}, "flags: dlrover-run refuses them: unrecognized arguments: --node-timout=20"),
        ({"flags": ["--node-timeout=2"]}, "flags: dlrover-run refuses them: argument --node-timeout"),
        ({"flags": ["--best=loss:min"], "command": ["train.py"]}, "flags: dlrover-run refuses them: --best is for a"),
        ({"flags": ["--log-dir"]}, "flags: dlrover-run would not find 'train.py' behind them: a flag"),
        ({"flags": ["verbose"]}, "flags: dlrover-run would not find 'train.py' behind them"),
        ({"flags": ["--help"]}, "flags: --help starts nothing"),
        ({"flags": ["--rdzv-id=other"]}, "flags: --rdzv-id is written by render: its value comes from name"),
        ({"command": ["--steps=1", "train.py"]}, "command: dlrover-run refuses it: unrecognized arguments: --steps=1"),
        ({"command": ["train.py", "${resume_dir}"]}, "command: dlrover-run refuses it: '${resume_dir}' without"),
        ({"env": {"PET_NODE_TIMEOUT": "2"}}, "env: dlrover-run refuses it: argument --node-timeout"),
    ],
)
def test_what_the_agent_would_refuse_is_refused(
    file: Path, capsys: Captured, target: str, changes: dict[str, Any], line: str
) -> None:
    """Before a machine is taken for it: a flag that there is not, a wrong value, a flag without one."""
    file.write_text(printed([{**GPT, **changes}]))
    assert run(["render", target, str(file)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert line in said


@pytest.mark.parametrize(
    "flags",
    [["-m"], ["--initial-checkpoint=/only/there"], ["--log-dir", "/logs"], ["--universal-checkpoint=gate", "-t", "3"]],
)
def test_flags_are_those_of_another_machine(
    file: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    """Its directories, and not this one's; its variables, and not those of whoever renders."""
    monkeypatch.setenv("PET_NODE_TIMEOUT", "2")
    for job in ({**GPT, "flags": flags}, {**GPT, "flags": flags, "command": ["-m", "package.train"]}):
        file.write_text(printed([job]))
        assert run(["render", "k8s", str(file)]) == 0
    assert capsys.readouterr().err == ""


def test_flags_beside_a_shell_have_no_place(file: Path, capsys: Captured) -> None:
    """They would be lost: that line is somebody else's."""
    job = {key: value for key, value in GPT.items() if key != "command"}
    file.write_text(printed([{**job, "shell": "exec dalsegno-run train.py", "flags": ["--node-timeout=20"]}]))
    assert run(["render", "k8s", str(file)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "flags: with shell they have no place: write them into that line" in said
