"""`dalsegno doctor SCRIPT`, as a person types it: real scripts, up to their first step."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest

from tests.support.pages.sources import ROOT

pytestmark = pytest.mark.timeout(180)
DALSEGNO = str(Path(sysconfig.get_path("scripts")) / "dalsegno")


def doctor(tmp_path: Path, *arguments: str, script: str = "") -> tuple[int, str]:
    """Exit code and what it prints; ``script`` is what ``train.py`` there holds."""
    (tmp_path / "train.py").write_text(textwrap.dedent(script))
    environment = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [DALSEGNO, "doctor", *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=170
    )
    return done.returncode, done.stdout


def test_what_a_training_is(tmp_path: Path) -> None:
    """With two ranks under torchrun: strategy, optimizer, and how its world can change. Nothing is made or saved."""
    script = str(ROOT / "examples" / "train.py")
    code, said = doctor(tmp_path, "--nproc-per-node=2", script, "--zero-stage=2", "--checkpoint-dir=there")
    assert code == 0
    assert "training: strategy deepspeed-zero-2 with AdamW, 2 ranks" in said
    assert "change of the world: goes on as it is: each rank takes its ranges" in said
    assert not (tmp_path / "there").exists()


OWN = """
    import sys
    from dalsegno.elastic import session

    s = session(checkpoint_dir="run")
    for attempt in range(3):
        try:
            for batch in s.steps(iter(range(9)), save=lambda path: (path / "x").write_text("x"), strategy="mine"):
                print("a step")
        except SystemExit:
            print("nothing may go on")
    for act in (lambda: s.begin_step(), lambda: s.save(lambda path: (path / "x").write_text("x")), lambda: s.finish()):
        try:
            act()
            print("a step")
        except SystemExit:
            pass
    sys.exit(7)
"""


def test_a_change_that_is_impossible_is_said_before_it_comes(tmp_path: Path) -> None:
    """Also to a script that swallows the end, and beside a run that holds the directory. No step is made."""
    (tmp_path / "run").mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", "import sys; from dalsegno.elastic import session; s = session('run'); print('here', "
         "flush=True); sys.stdin.read()"],
        cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "here\n"
        code, said = doctor(tmp_path, "train.py", script=OWN)
    finally:
        holder.kill()
        holder.communicate()
    assert code == 0, said
    assert "a step" not in said
    assert said.count("nothing may go on") == 3
    assert [path.name for path in (tmp_path / "run").iterdir() if not path.name.startswith(".")] == []
    assert "change of the world: impossible: nothing says where these data stand" in said
    assert "not saved: steps between two changes" in said


def test_a_script_without_a_session(tmp_path: Path) -> None:
    code, said = doctor(tmp_path, "train.py", "--lr=1", script="import sys; print(sys.argv[1:])")
    assert code == 1
    assert "['--lr=1']" in said
    assert "train.py ended without session().steps()" in said


def test_a_module(tmp_path: Path) -> None:
    code, said = doctor(tmp_path, "-m", "train", "--lr=1", script="import sys; print(sys.argv[1:])")
    assert code == 1
    assert "['--lr=1']" in said


def test_a_script_that_fails(tmp_path: Path) -> None:
    code, said = doctor(tmp_path, "train.py", script="raise ValueError('no data')")
    assert code == 1
    assert "train.py failed before its first step, with exit code 1" in said


def test_a_script_that_makes_no_step_is_ended(tmp_path: Path) -> None:
    """With what it has started, and although it is deaf to SIGTERM."""
    script = """
        import os, signal, subprocess, sys, time

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        print("child", child.pid, flush=True)
        time.sleep(1000)
    """
    code, said = doctor(tmp_path, "--timeout=3", "train.py", script=script)
    assert code == 1
    assert "train.py made no step within 3 s (--timeout): it was ended" in said
    child = int(said.split("child ")[1].split()[0])
    stat = Path(f"/proc/{child}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize("arguments", [["nowhere.py"], ["--nproc-per-node=0", "train.py"], ["--timeout=0", "train.py"]])
def test_what_cannot_be_looked_at(tmp_path: Path, arguments: list[str]) -> None:
    assert doctor(tmp_path, *arguments, script="")[0] == 2
