"""`dalsegno doctor SCRIPT`, as a person types it: real scripts, up to their first step."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest

from tests.support.jobs.master_process import eventually
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


@pytest.mark.full
def test_what_a_training_is(tmp_path: Path) -> None:
    """With two ranks under torchrun: strategy, optimizer, and how its world can change. Nothing is made or saved."""
    script = str(ROOT / "examples" / "train.py")
    code, said = doctor(tmp_path, "--nproc-per-node=2", script, "--zero-stage=2", "--checkpoint-dir=there")
    assert code == 0
    assert "training: strategy deepspeed-zero-2 with AdamW, 2 ranks" in said
    assert "change of the world: its checkpoints load as they are: each rank takes its ranges" in said
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


@pytest.mark.full
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


@pytest.mark.parametrize("arguments", [["train.py"], ["-m", "train"], ["--nproc-per-node=2", "train.py"]])
def test_a_script_without_a_session_does_not_train(tmp_path: Path, arguments: list[str]) -> None:
    """It would run to its end, and save over what is there."""
    (tmp_path / "model.py").write_text("import torch\n")
    code, said = doctor(tmp_path, *arguments, script="import model; open('ckpt.pt', 'w')")
    assert code == 1
    assert "train.py was not run" in said or "train was not run" in said
    assert "` runs it for S seconds" in said
    assert not (tmp_path / "ckpt.pt").exists()


def test_a_session_in_a_module_beside_the_script(tmp_path: Path) -> None:
    """The script's own text does not name it."""
    (tmp_path / "loop").mkdir()
    (tmp_path / "loop" / "__init__.py").write_text("from .inner import run\n")
    (tmp_path / "loop" / "inner.py").write_text("def run():\n    import dalsegno.elastic\n    print('run')\n")
    code, said = doctor(tmp_path, "train.py", script="from loop import inner\n\ninner.run()")
    assert code == 1
    assert "run\n" in said


def test_a_script_without_a_session_that_is_to_run(tmp_path: Path) -> None:
    """For so long as a person says, with the macros' values, and nothing of it is kept."""
    arguments = ["--timeout=60", "train.py", "--lr=1", "--out=${save_dir}", "--from", "${resume_dir}"]
    code, said = doctor(tmp_path, *arguments, script="import sys; print(sys.argv[1:])")
    assert code == 1
    assert "${" not in said
    assert "'--from'" not in said
    assert "train.py ended without session().steps()" in said


def test_a_script_of_torchruns(tmp_path: Path) -> None:
    """What it lacks is said, and one rank under torchrun has it."""
    script = "import os; print('rank', os.environ['RANK'])"
    code, said = doctor(tmp_path, "--timeout=60", "train.py", script=script)
    assert code == 1
    assert "if it lacks RANK, it needs torchrun: `dalsegno doctor --nproc-per-node=1 --timeout=60 train.py`" in said
    assert "rank 0" in doctor(tmp_path, "--timeout=60", "--nproc-per-node=1", "train.py", script=script)[1]


def test_a_module(tmp_path: Path) -> None:
    code, said = doctor(tmp_path, "--timeout=60", "-m", "train", "--lr=1", script="import sys; print(sys.argv[1:])")
    assert code == 1
    assert "['--lr=1']" in said


def test_a_script_that_fails(tmp_path: Path) -> None:
    code, said = doctor(tmp_path, "--timeout=60", "train.py", script="raise ValueError('no data')")
    assert code == 1
    assert "train.py failed before its first step, with exit code 1" in said


@pytest.mark.full
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


DAEMON = """
    import os, subprocess, sys, time

    def away(environment):  # out of its session and from its parent, which ends
        return subprocess.Popen(
            [sys.executable, "-c", "import os, subprocess, sys; print(subprocess.Popen([sys.executable, '-c', "
             "'import time; time.sleep(1000)'], start_new_session=True, env=os.environ).pid, flush=True)"],
            start_new_session=True, env=environment,
        ).wait()

    away(os.environ)
    away({})
    print(os.getpid(), flush=True)
    HOW
"""


@pytest.mark.parametrize("how", ["sys.exit(0)", "os.kill(os.getpid(), 9)", "if not os.fork(): time.sleep(1000)"])
def test_nothing_of_a_script_is_left_however_it_went_away(tmp_path: Path, how: str) -> None:
    """Daemons in sessions of their own, whose parents have ended, also without our environment; the script itself."""
    code, said = doctor(tmp_path, "--timeout=100", "train.py", script=DAEMON.replace("HOW", how))
    assert code == 1
    numbers = [int(line) for line in said.splitlines() if line.isdigit()]
    assert len(numbers) >= 3
    for number in numbers:
        stat = Path(f"/proc/{number}/stat")
        assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_where_the_doctor_is_ended(tmp_path: Path, number: int) -> None:
    """It is not there any more to end anything: what is in the script's group, what has left it, and its directory."""
    script = """
        import os, subprocess, sys, time

        wait = [sys.executable, "-c", "import time; time.sleep(1000)"]
        here, away = subprocess.Popen(wait, env={}), subprocess.Popen(wait, start_new_session=True)
        print(os.getpid(), here.pid, away.pid, flush=True)
        time.sleep(1000)
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(script))
    process = subprocess.Popen(
        [DALSEGNO, "doctor", "--timeout=100", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        left = [os.pidfd_open(int(pid)) for pid in process.stdout.readline().split()]
        assert len(list(tmp_path.glob("dalsegno-doctor-*"))) == 1
    finally:
        process.send_signal(number)
        process.communicate()
    assert len(left) == 3
    eventually(lambda: not list(tmp_path.glob("dalsegno-doctor-*")))
    for one in left:
        ended, _, _ = select.select([one], [], [], 60)
        os.close(one)
        assert ended


PLAIN = """
    import torch, torch.distributed as dist
    from torch.optim.lr_scheduler import StepLR
    from dalsegno.elastic import Batches, BatchPlan, ElasticSampler, TrainingState, session

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 24

        def __getitem__(self, index):
            return torch.randn(3)

    s = session(checkpoint_dir="run")
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = StepLR(optimizer, 3)
    state = TrainingState(s, model=model, optimizer=optimizer)
    state.load()
    batches = Batches(Rows(), ElasticSampler(24, 4), BatchPlan(4, s.world_size, 4), s.rank, resume=s.resume)
    for batch in s.steps(batches, save=state.write, save_every=2):
        print("a step")
"""


@pytest.mark.full
def test_what_would_go_wrong_is_not_called_well(tmp_path: Path) -> None:
    """A schedule that nobody saves, a model that nobody wraps, data that are drawn; and what it cannot see, it says."""
    code, said = doctor(tmp_path, "--nproc-per-node=2", "train.py", script=PLAIN)
    assert code == 0, said
    assert "a step" not in said
    assert "change of the world: refused, unless the script itself moves StepLR to session.step" in said
    assert "the same only in distribution: the data set: what it draws at random" in said
    assert "not seen: what averages the gradients of the ranks: no DistributedDataParallel" in said
    assert "not seen: the steps: " in said


@pytest.mark.parametrize("arguments", [["nowhere.py"], ["--nproc-per-node=0", "train.py"], ["--timeout=0", "train.py"]])
def test_what_cannot_be_looked_at(tmp_path: Path, arguments: list[str]) -> None:
    assert doctor(tmp_path, *arguments, script="")[0] == 2
