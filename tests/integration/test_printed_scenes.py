"""Printed commands that belong together, typed as they are printed, in as many terminals as they are meant for."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.jobs.etcd_members import ETCD, MISSING, etcd_members
from tests.support.jobs.master_process import eventually
from tests.support.jobs.stage import PATIENCE, Stage
from tests.support.pages import printed
from tests.support.pages.printed_code import CODE, NO_COMPILER
from tests.support.pages.printed_commands import COMMANDS, Scene
from tests.support.pages.sources import ROOT
from tests.support.workers import tiny_swift

pytestmark = pytest.mark.timeout(900)

Line = Callable[[str], str]
PLAIN, ELASTIC = (
    'engine.load_checkpoint("checkpoints")',
    "for batch in s.steps(batches, state, max_steps=300, save_every=20):",
)
SAVED, LOST = 75, -9


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    # A second growth shall not wait until the first one has paid for itself.
    one = Stage(tmp_path / "stage", {**tiny_swift.OFFLINE, "PET_GROW_INTERVAL": "0"})
    yield one
    one.close()


@pytest.fixture
def line(request: pytest.FixtureRequest) -> Iterator[Line]:
    """Finds the scene's printed command that begins so; each must have been asked for at the end."""
    own = {command for command, how in COMMANDS.items() if how == Scene(request.function.__name__)}
    left = set(own)

    def find(start: str) -> str:
        (found,) = (command for command in own if command.startswith(start))
        left.discard(found)
        return found

    yield find
    assert not left, "the scene leaves these out"


def write_printed_script(path: Path, line: str) -> None:
    """The printed block with that line, and what a reader has already."""
    (snippet,) = (snippet for snippet in CODE if snippet.line == line)
    (block,) = (block for block in printed.code() if snippet.is_of(block))
    path.write_text(snippet.source(block), encoding="utf-8")


@pytest.mark.full
def test_the_first_command_runs_the_printed_script(stage: Stage, line: Line) -> None:
    """The README's elastic loop, as `train.py`, under the first command that the README prints."""
    write_printed_script(stage.directory / "train.py", ELASTIC)
    said = stage.type(line("dlrover-run"))
    assert "the run finished at step 40" in said


def test_the_quickstart(stage: Stage, line: Line) -> None:
    """Two terminals; looked at, made smaller and larger, one killed, the other left with Ctrl-C; what is there then."""
    command = f"{line('dlrover-run')} --steps=5000 --layers=1"
    first = stage.start(command)
    first.wait_for(r"epoch 1: .* 1 node\b")
    second = stage.start(command)
    first.wait_for(r"epoch 2: .* 2 nodes")
    assert "running" in stage.type(line("dalsegno status"))
    stage.type(line("dalsegno scale 1"))
    first.wait_for(r"epoch 3: .* 1 node\b")
    stage.type(line("dalsegno scale 4"))
    first.wait_for(r"epoch 4: .* 2 nodes")
    assert line("kill -9")
    second.kill()
    assert second.wait() == LOST
    first.wait_for(r"epoch 5: .* 1 node\b")
    first.press_ctrl_c()
    assert first.wait() == SAVED
    assert "Traceback" not in first.text
    listed = stage.type(line("dalsegno checkpoints ls").replace("DIR", "checkpoints"))
    assert "sharded, deepspeed-zero-1, 1 ranks" in listed
    said = stage.type(line("dalsegno checkpoints verify").replace("DIR", "checkpoints"))
    assert "intact" in said
    newest = next(text for text in said.splitlines() if ".universal." not in text).split(":")[0]
    assert '"step"' in stage.type(line("dalsegno checkpoints show").replace("DIR", newest))
    # The run isn't over, so its own job prunes it.
    assert "has not finished it" in stage.type(line("dalsegno checkpoints prune").replace("DIR", "checkpoints"), code=1)


@pytest.mark.full
def test_a_script_without_a_session(stage: Stage, line: Line) -> None:
    """An ordinary DeepSpeed script that takes `--save-dir`: two terminals, and its own checkpoints become the run's."""
    shutil.copy(ROOT / "tests/support/workers/plain_deepspeed.py", stage.directory / "train.py")
    text = (stage.directory / "train.py").read_text(encoding="utf-8")
    text = text.replace("Path(__file__).resolve().parents[3]", "Path(__file__).resolve().parent")
    (stage.directory / "train.py").write_text(text, encoding="utf-8")
    # Its first line comes after 30 s: a session may still be opened.
    more = "--steps=150 --save-every=10 --global-batch-size=16 --seed=1 --step-time=0.5"
    command = f"{line('dlrover-run')} {more}"
    first = stage.start(command)
    first.wait_for(r"epoch 1: .* 1 node\b")
    second = stage.start(command)
    first.wait_for(r"epoch 2: .* 2 nodes")
    assert (first.wait(300), second.wait()) == (0, 0)
    assert "the run finished" in first.text


@pytest.mark.full
def test_a_master_that_is_a_service(stage: Stage, line: Line, tmp_path: Path) -> None:
    """Token, certificate, master and two nodes on one machine; a finished job stays finished."""
    store = str(tmp_path / "store")
    stage.type(line("mkdir").replace("/var/lib/dalsegno", store))
    stage.type(line("(umask"))
    assert (stage.directory / "token").stat().st_mode & 0o077 == 0
    stage.type(line("openssl").replace("HOST", "localhost"))
    command = line("dlrover-master").replace("0.0.0.0", "127.0.0.1").replace("29400", "0")
    master = stage.start(command.replace("/var/lib/dalsegno", store))
    port = master.wait_for(r"127\.0\.0\.1:(\d+)").group(1)
    write_printed_script(stage.directory / "train.py", ELASTIC)
    node = line("dlrover-run").replace("HOST:29400", f"localhost:{port}").replace("/shared", str(tmp_path / "shared"))
    nodes = [stage.start(node) for _ in range(2)]
    nodes[0].wait_for(r"the run finished at step 40")
    assert [node.wait() for node in nodes] == [0, 0]
    assert "finished" in stage.type(node)
    assert "gpt" in stage.type(line("dalsegno status").replace("HOST:29400", f"localhost:{port}"))
    master.terminate()
    master.wait()


@pytest.mark.full
def test_a_relayed_run(stage: Stage, line: Line, tmp_path: Path) -> None:
    """A Commander and two pods: the first is left with Ctrl-C, the second goes on; what is there is intact."""
    volume = str(tmp_path / "volume")
    told = line("export")
    stage.type(line("mkdir").replace("/tmp/volume", volume))
    path = stage.directory / "deploy" / "relay" / "quickstart.yaml"
    text = path.read_text().replace("/tmp/volume", volume)
    path.write_text(text)
    master = line("dlrover-master").replace("8443", "0").replace("/tmp/volume", volume)
    commander = stage.start(f"{told}; exec {master}")
    port = commander.wait_for(r'"http": "127\.0\.0\.1:(\d+)"').group(1)
    path.write_text(text.replace("8443", port))
    pod = f"{told}; exec {line('dalsegno relay deploy')}"
    first = stage.start(pod)
    steps = Path(volume) / "steps"
    deadline = time.monotonic() + 120
    while not (steps.exists() and len(steps.read_text().splitlines()) > 30):
        assert time.monotonic() < deadline, first.text
        time.sleep(0.1)  # why: another process's file tells nobody that it grows
    second = stage.start(pod)
    second.wait_for("is a spare")
    first.press_ctrl_c()
    assert first.wait() == 75, first.text
    assert second.wait() == 0, second.text
    assert "intact" in stage.type(line("dalsegno relay verify"))
    commander.terminate()
    commander.wait()
    made = [json.loads(one) for one in steps.read_text().splitlines()]
    assert [one[0] for one in made] == list(range(1, 2001)), "not a step is lost"


@pytest.mark.full
@pytest.mark.skipif(ETCD is None, reason=MISSING)
def test_several_masters(stage: Stage, line: Line, tmp_path: Path) -> None:
    """The one that leads is killed while the job trains."""
    pytest.importorskip("aetcd")
    stage.type("(umask 077; openssl rand -hex 32 > token)")
    certificate = "openssl req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -days 365 -subj /CN=gpt"
    stage.type(f"{certificate} -addext subjectAltName=DNS:localhost")
    write_printed_script(stage.directory / "train.py", ELASTIC)
    with etcd_members(tmp_path / "etcd", 3) as members:
        there = line("dlrover-master").replace("0.0.0.0", "127.0.0.1").replace("=HOST", "=localhost")
        there = there.replace("29400", "0").replace("E1:2379,E2:2379,E3:2379", ",".join(members.endpoints))
        masters = [stage.start(there) for _ in range(3)]
        ports = [one.wait_for(r"127\.0\.0\.1:(\d+)").group(1) for one in masters]
        asked = ",".join(f"localhost:{port}" for port in ports)
        node = line("dlrover-run").replace("M1:29400,M2:29400,M3:29400", asked).replace("/shared", str(tmp_path))
        nodes = [stage.start(node) for _ in range(2)]
        nodes[0].wait_for(r"epoch \d+: ")
        leader = next(one for one in masters if "generation" in one.text)
        leader.process.kill()
        nodes[0].wait_for(r"the run finished at step 40")
        assert [one.wait() for one in nodes] == [0, 0]
        others = [one for one in masters if one is not leader]
        assert any("generation" in one.text for one in others)
        for one in others:
            one.terminate()
            one.wait()


# It makes steps for minutes.
PATIENT = """
import time, torch
from dalsegno.elastic import session
s = session()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
state = s.state(model, optimizer)
data = s.data(torch.zeros(64, 5), global_batch=16, micro_batch=4)
for batch in s.steps(data, state, max_steps=4000, save_every=10):
    for micro in batch:
        micro.scale(model(micro.data[:, :4]).square().mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.05)
"""


@pytest.mark.full  # the short one: test_going_back.py
def test_back_to_an_earlier_step(stage: Stage, line: Line) -> None:
    """What came after stays on the disk; the same command does not go back again; once more on request."""
    (stage.directory / "train.py").write_text(PATIENT)
    back = line("dlrover-run").replace(" train.py", " --keep-checkpoints=0 train.py")

    def sealed(step: int, epoch: int) -> list[Path]:
        return list(stage.directory.glob(f"checkpoints/*/run-0001/step-{step}.e{epoch}.*/MANIFEST.json"))

    def leave_after(typed: str, step: int, epoch: int) -> str:
        """What is said until this step of that epoch is saved, and the node has left."""
        terminal = stage.start(typed)
        eventually(lambda: sealed(step, epoch) or terminal.process.poll() is not None, PATIENCE)
        terminal.press_ctrl_c()
        assert terminal.wait() == SAVED, terminal.text
        assert "Traceback" not in terminal.text
        return terminal.text

    leave_after(back.replace("--resume-step=20 ", ""), 40, 1)
    assert "run-0001 goes back to step 20 (step-20.e1.1), as --resume-step says" in leave_after(back, 30, 2)
    said = leave_after(back, 50, 3)
    assert "--resume-step has been followed: run-0001 went back to step 20 before epoch 2, and goes on from" in said
    assert "goes back to step 20 (step-20.e1.1)" in leave_after(back.replace("=20", "=20:2"), 30, 4)
    assert all(sealed(step, 1) for step in (10, 20, 30, 40)), "kept aside, not deleted"


@pytest.mark.full
def test_a_conversion_by_hand(stage: Stage, line: Line) -> None:
    """What the plain DeepSpeed loop has saved; killed or not, the same command again finds it complete."""
    write_printed_script(stage.directory / "plain.py", PLAIN)
    stage.type("torchrun plain.py")
    command = line("dalsegno convert").replace("global_step400", "global_step5")
    for _ in range(2):
        stage.type(command)
    made = stage.directory / "universal"
    assert (made / "latest_universal").read_text(encoding="utf-8") == "global_step5"
    assert any((made / "global_step5").glob("zero/*/fp32.pt"))


@pytest.mark.full
def test_ms_swift(stage: Stage, line: Line, tmp_path: Path) -> None:
    """From `swift sft` to our entry and to the plugin, with a tiny model where `…` stands, on fewer ranks."""
    tiny_swift.make_model(stage.directory / "model")
    data = tiny_swift.make_data(stage.directory / "data.jsonl", 64)
    flags = tiny_swift.flags(stage.directory / "model", data, max_steps=2, add_version="false")
    cpu = " ".join(flags)

    def typed(command: str) -> str:
        """Two ranks; the model and the data are named where they are printed, all else behind them."""
        for printed_text, ours in (
            ("NPROC_PER_NODE=4", "NPROC_PER_NODE=2"),
            ("--nproc-per-node=4", "--nproc-per-node=2"),
            ("/shared", str(tmp_path / "shared")),
            ("--model … --dataset …", cpu),
        ):
            command = command.replace(printed_text, ours)
        return command

    # DeepSpeed by itself would compile an extension for minutes, which ours leaves out.
    (stage.directory / "no_compiler.py").write_text(NO_COMPILER, encoding="utf-8")
    stage.type(f"{typed(line('NPROC_PER_NODE=4 swift sft'))} --external_plugins no_compiler.py", seconds=300)
    assert (stage.directory / "out/checkpoint-2").is_dir()
    said = stage.type(typed(line("dlrover-run --nnodes=1:4 --nproc-per-node=4")), seconds=300)
    assert "the run finished at step 2" in said
    assert (tmp_path / "shared/out/checkpoint-2").is_dir()
    plugin = line("dlrover-run --nnodes=1:4 … -m swift.cli.sft")
    short = line("dlrover-run --nnodes=1:4 … -m dalsegno.swift_plugin.sft …")
    for number, command in enumerate((plugin, short)):
        before, _, behind = command.partition("…")
        command = f"{before} --checkpoint-dir=checkpoints-{number} {behind}".replace(
            "sft …", f"sft {cpu} --output_dir=out-{number} --save_steps=2 --per_device_train_batch_size=2"
        )
        assert "…" not in command
        assert "the run finished at step 2" in stage.type(command, seconds=300)
        assert (stage.directory / f"out-{number}/checkpoint-2").is_dir()
