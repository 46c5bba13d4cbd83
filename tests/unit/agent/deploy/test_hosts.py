"""What is rendered for Slurm and systemd: the shells and programs that read it do, and commands arrive as written."""

from __future__ import annotations

import configparser
import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from dalsegno.agent.commands import arguments
from dalsegno.agent.deploy.slurm import script
from dalsegno.agent.deploy.systemd import units
from dalsegno.master import cli
from tests.support.deploy import ETCD, GPT, TLS, job
from tests.support.pages.sources import ROOT

MANY = {"host": {"master": "a:29400,b:29400", "directory": "/shared/gpt"}}
KINDS: dict[str, dict[str, Any]] = {"plain": {}, "etcd": {**ETCD, **MANY}, "tls": TLS}
AWKWARD = ["train.py", "it's", 'a "b" c', "$HOME", "${save_dir}", "100%d", "back\\slash", "*", ";", "", "a=b"]
# Systemd's first version with credentials, and with the specifier for their directory.
CREDENTIALS = 250


def run_script(text: str, directory: Path, code: int = 0, starts: int = 0) -> list[str]:
    """Runs a batch script with a program in the place of dlrover-run; returns what that was given, a line each."""
    (directory / "bin").mkdir()
    program = directory / "bin" / "dlrover-run"
    program.write_text(
        f'#!/bin/bash\nprintf "%s\\n" "$@" > "{directory}/given"; env > "{directory}/env"\nexit {code}\n'
    )
    program.chmod(0o755)
    requeue = directory / "bin" / "scontrol"
    requeue.write_text(f'#!/bin/bash\necho "$@" > "{directory}/requeued"\n')
    requeue.chmod(0o755)
    environment = {**os.environ, "PATH": f"{directory}/bin:{os.environ['PATH']}"}
    environment |= {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2", "SLURM_RESTART_COUNT": str(starts)}
    (directory / "job.sbatch").write_text(text)
    done = subprocess.run(["bash", str(directory / "job.sbatch")], env=environment, check=False, timeout=60)
    assert done.returncode == code
    return (directory / "given").read_text().splitlines()


@pytest.mark.parametrize("code", [0, 1, 2, 75, 76])
def test_the_batch_script_runs(tmp_path: Path, code: int) -> None:
    """bash reads it, the agent gets its words, and only who left on notice asks for another start."""
    host = {**GPT["host"], "directory": str(tmp_path), "bin": f"{tmp_path}/bin"}
    text = script(job(command=AWKWARD, host=host, env={"A": "x y $HOME"}, replicas=3, slurm={"partition": "spot"}))
    words = run_script(text, tmp_path, code)
    options = arguments.parse(words, {})
    assert [options.training_script, *options.training_script_args] == AWKWARD
    assert (options.job_id, options.master) == ("gpt", "head:29400")
    assert options.checkpoint_dir == f"{tmp_path}/checkpoints"
    assert options.connect_timeout >= 3600
    assert "A=x y $HOME" in (tmp_path / "env").read_text().splitlines()
    assert (tmp_path / "requeued").exists() == (code in (75, 76))
    assert not (tmp_path / "requeued").exists() or (tmp_path / "requeued").read_text() == "requeue Incomplete 7_2\n"


@pytest.mark.parametrize(
    ("code", "starts", "again"), [(137, 0, True), (137, 99, True), (137, 100, False), (75, 100, True)]
)
def test_a_killed_agent_is_not_started_for_ever(tmp_path: Path, code: int, starts: int, again: bool) -> None:
    """Its task starts again up to a hundred times; who leaves on notice is not counted out."""
    host = {**GPT["host"], "directory": str(tmp_path), "bin": f"{tmp_path}/bin"}
    run_script(script(job(host=host)), tmp_path, code, starts)
    assert (tmp_path / "requeued").exists() == again


@pytest.mark.slow
def test_the_batch_script_passes_a_notice_on(tmp_path: Path) -> None:
    """As SIGHUP, which agents never take for a second notice; it waits for the end, and asks for another start."""
    (tmp_path / "bin").mkdir()
    for name, text in {
        "dlrover-run": "trap 'echo left; exit 75' HUP; echo started; while :; do sleep 0.05; done",
        "scontrol": 'echo "$@"',
    }.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    host = {**GPT["host"], "directory": str(tmp_path), "bin": f"{tmp_path}/bin"}
    environment = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    environment |= {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    (tmp_path / "job.sbatch").write_text(script(job(host=host)))
    line = ["bash", str(tmp_path / "job.sbatch")]
    with subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True) as shell:
        try:
            assert shell.stdout is not None
            assert shell.stdout.readline() == "started\n"
            deadline = time.monotonic() + 60
            while not caught(shell.pid, signal.SIGTERM):
                assert time.monotonic() < deadline
                time.sleep(0.01)  # why: a shell tells nobody of its traps
            shell.terminate()
            said, _ = shell.communicate(timeout=60)
            assert (shell.returncode, said) == (75, "left\nrequeue Incomplete 7_2\n")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)


def caught(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler of this signal."""
    found = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> (number - 1) & 1)


def test_slurm_gives_the_notice_before_the_end() -> None:
    """Its options are one to a line, before the first command; the signal comes `grace` seconds before the limit."""
    text = script(job(drain_timeout=120, slurm={"partition": "spot", "time": "1:00:00"}))
    lines = text.splitlines()
    options = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")}
    assert lines[0] == "#!/bin/bash"
    assert lines.index("") == len(options) + 1
    assert {"--signal=B:TERM@135", "--requeue", "--array=0-3", "--partition=spot", "--time=1:00:00"} <= options
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False, timeout=60).returncode == 0


def version() -> int:
    """Of systemd; 0: there is none."""
    if shutil.which("systemd-analyze") is None:
        return 0
    said = subprocess.run(["systemd-analyze", "--version"], capture_output=True, text=True, check=False, timeout=60)
    found = re.match(r"systemd (\d+)", said.stdout)
    return int(found[1]) if found else 0


@pytest.mark.skipif(version() < CREDENTIALS, reason="no systemd-analyze here that knows LoadCredential and %d")
@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_systemd_takes_the_units(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Every line of them is known to it; programs, user and directories are other people's."""
    (tmp_path / "bin").mkdir()
    for name in ("dlrover-run", "dlrover-master"):
        os.symlink("/bin/true", tmp_path / "bin" / name)
    host = {**GPT["host"], **changes.get("host", {}), "bin": f"{tmp_path}/bin", "user": "daemon"}
    made = units(job(**{**changes, "command": AWKWARD, "env": {"A": 'x "y" %d $z'}, "host": host}))
    for name, text in made.items():
        (tmp_path / name).write_text(text)
        command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / name)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert not [line for line in (done.stdout + done.stderr).splitlines() if name in line]
    # And it does say what it does not know.
    (tmp_path / "wrong.service").write_text(made["gpt.service"].replace("KillMode=mixed", "KillModus=mixed"))
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "wrong.service")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert "KillModus" in done.stdout + done.stderr


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_both_programs_take_their_command_lines(changes: dict[str, Any]) -> None:
    """Specifiers replaced as systemd would, they are flags that there are; secrets are credentials of the unit."""
    made = units(job(**changes))
    lines = {name: text.replace(" \\\n ", "") for name, text in made.items()}
    starts = {name: re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)[0] for name, text in lines.items()}
    words = starts["gpt.service"].replace("%d", "/c").split()
    options = arguments.parse(words[1 : words.index("train.py") + 1], {})
    assert (options.job_id, options.token_file) == ("gpt", "/c/token")
    # A start that gives up ends with 2, which the unit takes for the last one.
    assert options.connect_timeout >= 3600
    words = starts["gpt-master.service"].replace("%d", "/c").replace("%S", "/var/lib").replace("%H", "a").split()
    master = cli._parser().parse_args(words[1:])
    cli._check_several(master)
    assert master.port == 29400
    assert str(master.token_file) == "/c/token"
    given = re.findall(r"^LoadCredential=(\S+?):", made["gpt-master.service"], re.MULTILINE)
    assert set(re.findall(r"%d/(\S+)", starts["gpt-master.service"])) == set(given)


def test_a_node_is_told_and_then_killed() -> None:
    """`KillMode=mixed`, a time that outlasts the drain, and starts anew after 75 and 76 but not after 1 and 2."""
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(units(job(drain_timeout=60))["gpt.service"].replace("\\\n", ""))
    service = dict(parser["Service"])
    assert (service["KillMode"], service["TimeoutStopSec"]) == ("mixed", "75")
    assert service["RestartForceExitStatus"] == "75 76"
    assert service["RestartPreventExitStatus"] == "1 2"
    assert "gpt-token/token" in service["LoadCredential"]


@pytest.mark.parametrize(
    ("key", "user"), [({}, "dalsegno"), *(({"user": name}, name) for name in ("train", "ml_train", "Svc.ml-2", "1000"))]
)
def test_who_runs_it_is_told(key: dict[str, str], user: str) -> None:
    """In both units, with what happens without that user; and the page's table of keys has the default."""
    for text in units(job(host={**GPT["host"], **key})).values():
        assert re.search(rf"^# host\.user: .* 217/USER\.\nUser={user}$", text, re.MULTILINE)
    (row,) = re.findall(r"^\| `host` \|.*$", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
    assert f"`user` (systemd: `{job().host.user}`" in row


def test_a_node_has_a_home() -> None:
    """The user that the page makes has one, which `useradd --system` alone does not make; the unit says what for."""
    assert "home" in units(job())["gpt.service"].partition("\nUser=")[0]
    made = re.findall(r"`useradd [^`]+`", (ROOT / "docs" / "operations.md").read_text())
    assert made == [f"`useradd --system --create-home {job().host.user}`"]


def test_a_master_is_started_for_ever() -> None:
    """By itself systemd gives up after five starts in ten seconds: a machine may be short of room for longer."""
    parser = configparser.RawConfigParser(strict=False)
    parser.read_string(units(job())["gpt-master.service"].replace("\\\n", ""))
    assert parser["Unit"]["StartLimitIntervalSec"] == "0"
    assert (parser["Service"]["Restart"], parser["Service"]["RestartPreventExitStatus"]) == ("always", "2 3")


def test_a_master_may_lie_in_a_home() -> None:
    """As in somebody's venv, or with the Python of uv or pyenv: there it can be read, and not written."""
    text = units(job())["gpt-master.service"]
    assert re.findall(r"^ProtectHome=(.*)$", text, re.MULTILINE) == ["read-only"]


@pytest.mark.parametrize("word", AWKWARD[1:])
def test_systemd_hands_words_on_as_they_are(word: str) -> None:
    """Read back by the rules of systemd.service(5): quotes, backslashes, then `%%` and `$$`."""
    text = units(job(command=["train.py", word]))["gpt.service"]
    (last,) = re.findall(r"train\.py \\\n  (.*)$", text, re.MULTILINE)
    bare = re.fullmatch(r'"(.*)"', last)
    inner = re.sub(r"\\(.)", r"\1", bare[1] if bare else last)
    assert bare or not re.search(r"[\s\"';]", last)
    assert not re.search(r"(?<!%)(%%)*%(?!%)|(?<!\$)(\$\$)*\$(?!\$)", inner)
    assert inner.replace("%%", "%").replace("$$", "$") == word
