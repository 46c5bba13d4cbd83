"""Bad input, each with the real commands: one clear line that says the cause and what to change, and no success."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from dalsegno.protos.contract import CONTROL_PROTOCOL
from tests.support.jobs.master_process import master_process
from tests.support.jobs.shell import Shell, expect_one_line

pytestmark = pytest.mark.timeout(150)

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = ("--steps=3", "--save-every=0", "--global-batch-size=4")
DALSEGNO = (sys.executable, "-m", "dalsegno.agent.commands.dalsegno")
# A client of tomorrow: the same agent, which says that it speaks a newer protocol.
NEWER = """
import sys
from dalsegno.protos import contract
contract.CONTROL_PROTOCOL = 99
from dalsegno.agent.commands.dlrover_run import main
sys.argv[0] = "dlrover-run"
main()
"""


def test_unknown_flag(shell: Shell) -> None:
    """Named, and where to look."""
    expect_one_line(shell.run("--no-such-flag", "x.py"), "--no-such-flag", "--help")


def test_more_nodes_needed_than_allowed(shell: Shell) -> None:
    """The likely intention is spelt out."""
    expect_one_line(shell.run("--nnodes=4:1", "x.py"), "--nnodes", "did you mean 1:4")


def test_missing_script(shell: Shell) -> None:
    """Its name, and the directory that it was looked for in."""
    expect_one_line(shell.run("nothing.py"), "nothing.py does not exist", str(shell.directory))


def test_checkpoint_directory_below_a_file(shell: Shell) -> None:
    """Nothing can be made there, not even by root."""
    (shell.directory / "file").touch()
    ended = shell.run("--checkpoint-dir=file/checkpoints", str(EXAMPLES / "ddp.py"))
    expect_one_line(ended, "file/checkpoints cannot be written", "Not a directory", "--checkpoint-dir")


def test_checkpoint_directory_on_a_read_only_file_system(shell: Shell) -> None:
    """As an NFS export or a container volume would be."""
    place = shell.directory / "volume"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "ro,size=64k", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    try:
        ended = shell.run("--checkpoint-dir=volume/checkpoints", str(EXAMPLES / "ddp.py"))
    finally:
        subprocess.run(["umount", str(place)], check=True, timeout=30)
    expect_one_line(ended, "volume/checkpoints cannot be written", "Read-only file system", "--checkpoint-dir")


def test_master_port_in_use(shell: Shell) -> None:
    """The port, and why."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        store = f"sqlite:///{shell.directory / 'job.sqlite'}"
        ended = shell.run(
            f"--port={port}", "--job-id=job", f"--store={store}", command=(sys.executable, "-m", "dalsegno.master")
        )
    expect_one_line(ended, f"port {port}", "Address already in use")


def test_meeting_point_whose_port_is_in_use(shell: Shell) -> None:
    """Of a master that this node was to host: the flags are those of dlrover-run."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        endpoint = f"127.0.0.1:{holder.getsockname()[1]}"
        ended = shell.run(
            "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--job-id=job", str(EXAMPLES / "ddp.py")
        )
    expect_one_line(ended, "Address already in use", "choose another port in --rdzv-endpoint or --master-port")
    assert "--host" not in ended.text


def test_unreachable_master(shell: Shell) -> None:
    """Within --connect-timeout, with the address."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        began = time.monotonic()
        ended = shell.run(f"--master={address}", "--job-id=job", "--connect-timeout=3", str(EXAMPLES / "ddp.py"))
    expect_one_line(ended, "no master answered within 3 s", address)
    assert time.monotonic() - began < 60


def test_unreachable_master_of_a_variable(shell: Shell) -> None:
    """It is ours as likely as not, and late: who unset the variable would start a second one for the job."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        script = str(EXAMPLES / "ddp.py")
        ended = shell.run("--job-id=job", "--connect-timeout=3", script, DLROVER_MASTER_ADDR=address)
    expect_one_line(ended, "no master answered within 3 s", address, "the variable DLROVER_MASTER_ADDR names it")
    assert "unset" not in ended.text
    assert "--rdzv" not in ended.text


def test_address_that_cannot_be_resolved(shell: Shell) -> None:
    """It is waited for, as names may come late after a boot: one line says so, and the last one what is wrong."""
    began = time.monotonic()
    ended = shell.run(
        "--master=no-such-host.invalid:1", "--job-id=job", "--connect-timeout=3", str(EXAMPLES / "ddp.py")
    )
    assert time.monotonic() - began >= 3
    waits, last = ended.text.splitlines()
    assert "no-such-host.invalid:1 cannot be reached yet" in waits
    assert "trying for 3 s (--connect-timeout)" in waits
    assert ended.code == 2
    assert "error: no-such-host.invalid:1 cannot be reached: " in last
    assert last.endswith("; check --master, or --rdzv-endpoint")


def test_what_is_not_this_nodes_own_address_is_not_waited_for(shell: Shell) -> None:
    """`--local-addr` is a person's word, and a misspelt one would stay one."""
    began = time.monotonic()
    arguments = ("--master=no-such-host.invalid:1", "--local-addr=none.invalid", "--job-id=job")
    ended = shell.run(*arguments, "--connect-timeout=600", str(EXAMPLES / "ddp.py"))
    expect_one_line(ended)
    assert time.monotonic() - began < 120


def test_newer_client(shell: Shell) -> None:
    """The master says which versions it speaks; the agent does not try again."""
    with master_process(shell.directory / "job.sqlite") as master:
        arguments = (f"--master={master.address}", "--job-id=job", str(EXAMPLES / "ddp.py"))
        ended = shell.run(*arguments, command=(sys.executable, "-c", NEWER))
    expect_one_line(ended, "protocol 99", f"only {CONTROL_PROTOCOL}", "upgrade dalsegno on the master")


def test_the_master_of_another_launcher(shell: Shell) -> None:
    """In a pod of DLRover's operator the variable names DLRover's own: a gRPC server that knows none of our calls."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        script = str(EXAMPLES / "ddp.py")
        named = shell.run("--job-id=job", script, DLROVER_MASTER_ADDR=address)
        given = shell.run("--job-id=job", f"--master={address}", script)
        asked = shell.run("status", command=DALSEGNO, DLROVER_MASTER_ADDR=address)
    finally:
        server.stop(0).wait(5)
    what = f"what answers at {address} is not Dal Segno's dlrover-master"
    expect_one_line(named, what, "variable DLROVER_MASTER_ADDR", "unset it", "--rdzv-endpoint=HOST:PORT")
    expect_one_line(given, what)
    assert "DLROVER" not in given.text
    expect_one_line(asked, what, "DLROVER_MASTER_ADDR", code=1)


def test_other_job(shell: Shell) -> None:
    """A master serves one job."""
    with master_process(shell.directory / "job.sqlite") as master:
        ended = shell.run(f"--master={master.address}", "--job-id=other", str(EXAMPLES / "ddp.py"))
    expect_one_line(ended, "'job', not 'other'", "--job-id")


def test_disagreeing_agent(shell: Shell) -> None:
    """Another --nnodes than the job's is told what the job has."""
    with master_process(shell.directory / "job.sqlite", "--nnodes=1:2") as master:
        ended = shell.run(
            f"--master={master.address}", "--job-id=job", "--nnodes=1:4", str(EXAMPLES / "ddp.py"), *SMALL
        )
    assert "Traceback" not in ended.text
    assert any("1:2" in line and "1:4" in line for line in ended.said), ended.text


def test_script_that_fails_at_once(shell: Shell) -> None:
    """The job ends with the script's own error: trying again would not help."""
    (shell.directory / "fails.py").write_text("raise ValueError('no such column: price')\n")
    ended = shell.run("--checkpoint-dir=checkpoints", "--log-dir=logs", "fails.py")
    assert ended.code == 1
    assert "no such column: price" in ended.text
    # The cause is told once, and once more at the end.
    cause, last = (line for line in ended.said if "no such column: price" in line)
    assert "exited with code 1" in cause, ended.text
    assert [line for line in ended.said if "failed as before, attempt 4 of 4" in line], ended.text
    # The last word is the verdict, and what to do.
    assert ended.said[-1] == last
    assert last.startswith("dlrover-run: warning: the job failed: "), ended.text
    assert f"logs in {shell.directory / 'logs'}" in last
    assert "the same command tries again" in last
    # The traceback is the script's; none is ours.
    assert not [line for line in ended.text.splitlines() if "dalsegno" in line and "File" in line], ended.text


def test_script_that_refuses_its_arguments(shell: Shell) -> None:
    """Its own complaint is shown, and the job ends."""
    ended = shell.run("--checkpoint-dir=checkpoints", str(EXAMPLES / "ddp.py"), "--no-such-script-flag")
    assert ended.code == 1
    assert "unrecognized arguments: --no-such-script-flag" in ended.text
    assert any("exited with code 2" in line for line in ended.said), ended.text
    assert "Traceback" not in ended.text


def test_script_that_leaves_its_session_unfinished(shell: Shell) -> None:
    """Exit status 0 in the middle of a run is no success: the line says what to call when the training is done."""
    (shell.directory / "leaves.py").write_text("from dalsegno.elastic import session\nsession()\nraise SystemExit(0)\n")
    ended = shell.run("--checkpoint-dir=checkpoints", "leaves.py")
    assert ended.code == 1
    assert any("exited with code 0" in line and "session.finish()" in line for line in ended.said), ended.text
    assert not list(shell.directory.glob("checkpoints/*/*/FINISHED.json"))


def test_script_that_ends_at_once(shell: Shell) -> None:
    """Exit status 0 without a step is a finished run."""
    (shell.directory / "nothing_to_do.py").write_text("print('nothing to do')\n")
    ended = shell.run("--checkpoint-dir=checkpoints", "nothing_to_do.py")
    assert ended.code == 0
    assert re.match(r"dlrover-run: job nothing_to_do-[0-9a-f]{8} \(the same command ", ended.said[0]), ended.text
    assert any("finished" in line for line in ended.said), ended.text
    assert "Traceback" not in ended.text
