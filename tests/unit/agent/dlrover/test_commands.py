"""What commands say of a script that uses DLRover's library, without running it."""

from __future__ import annotations

import subprocess
import sys
import zipapp
from pathlib import Path

import pytest

from dalsegno.agent.commands.arguments import parse
from dalsegno.agent.commands.dlrover_run import check_dlrover
from dalsegno.agent.script import Script, dlrover_text, uses_dlrover
from dalsegno.protos.options import UsageError

IMPORT = "from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer\n"
TRAINER = (
    "from dlrover.trainer.torch.elastic.trainer import ElasticTrainer\n"
    "with ElasticTrainer(model).step(fix_total_batch_size=True):\n    pass\n"
)
SHARDS = "from dlrover.python.elastic_agent.sharding.client import ShardingClient\n"


def said(directory: Path, module: str, *arguments: str) -> tuple[int, str]:
    """Exit code and output of a command of ours."""
    line = [sys.executable, "-m", f"dalsegno.agent.commands.{module}", *arguments]
    done = subprocess.run(line, cwd=directory, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_the_doctor_reads_a_script(tmp_path: Path) -> None:
    """It neither runs nor imports it: this one would fail."""
    (tmp_path / "train.py").write_text(f"{IMPORT}raise SystemExit('it was run')\n", encoding="utf-8")
    code, text = said(tmp_path, "dalsegno", "doctor", "--dlrover", "train.py")
    assert code == 0
    assert "DdpCheckpointer" in text
    assert "it was run" not in text


@pytest.mark.slow
def test_the_doctor_says_that_a_script_will_be_refused(tmp_path: Path) -> None:
    """With the line that the run would end with."""
    (tmp_path / "train.py").write_text(SHARDS, encoding="utf-8")
    code, text = said(tmp_path, "dalsegno", "doctor", "--dlrover", "train.py")
    assert code == 1
    assert "refused: train.py uses ShardingClient" in text


def test_a_run_that_needs_dlrovers_master_ends_with_one_line(tmp_path: Path) -> None:
    """Before anything is started."""
    (tmp_path / "train.py").write_text(SHARDS, encoding="utf-8")
    code, text = said(tmp_path, "dlrover_run", "train.py")
    assert code == 2
    assert "ShardingClient" in text
    assert text.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    ("text", "wanted"), [(IMPORT, True), ("import dlrover\n", True), ("import dlrover_x\n", False), ("", False)]
)
def test_a_scripts_own_text_tells(tmp_path: Path, text: str, wanted: bool) -> None:
    """Not the name of a module that only begins alike."""
    path = tmp_path / "train.py"
    path.write_text(text, encoding="utf-8")
    assert uses_dlrover(Script(sys.executable, ("-u", str(path)))) is wanted


@pytest.mark.parametrize("command", [("train.py",), ("-m", "train")])
def test_a_module_is_refused_and_warned_as_a_script_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    """Nothing was said of a module."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAINER, encoding="utf-8")
    (line,) = check_dlrover(parse(["--nnodes=1:4", *command], {}))
    assert "different numbers of micro-batches with 3 of 4 nodes" in line
    (line,) = check_dlrover(parse(["--nnodes=1:4", "--dlrover-fixes", *command], {}))
    assert "all ranks make as many micro-batches" in line
    Path("train.py").write_text(SHARDS, encoding="utf-8")
    with pytest.raises(UsageError, match="uses ShardingClient of dlrover"):
        check_dlrover(parse(list(command), {}))


def test_what_a_scripts_own_module_uses_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But refused only when it is made: what other scripts need may stand there, too."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import loop\n", encoding="utf-8")
    Path("loop.py").write_text(TRAINER + SHARDS, encoding="utf-8")
    (line,) = check_dlrover(parse(["--nnodes=1:4", "train.py"], {}))
    assert "micro-batches" in line


@pytest.mark.parametrize("command", [("-m", "json.tool"), ("app.pyz",)])
def test_fixes_of_what_cannot_be_read_say_what_they_take_for_granted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    """A script that wants another batch in each world would get the same one without a word."""
    monkeypatch.chdir(tmp_path)
    Path("app").mkdir()
    Path("app", "__main__.py").write_text(TRAINER, encoding="utf-8")
    zipapp.create_archive("app", "app.pyz")
    (line,) = check_dlrover(parse(["--dlrover-fixes", *command], {}))
    assert "its batches are taken to be the same in every world" in line
    assert check_dlrover(parse(list(command), {})) == []


def test_only_what_imports_the_library_says_how_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A framework's own class of a like name, in a file beside one optional backend, is none of DLRover's."""
    monkeypatch.chdir(tmp_path)
    Path("one.py").write_text("import dlrover\n")
    Path("two.py").write_text("class DeepSpeedCheckpointer: ...\n")
    Path("train.py").write_text("import one, two\n")
    assert dlrover_text(Path("train.py")) == "import dlrover\n"
    Path("one.py").write_text("")
    assert dlrover_text(Path("train.py")) == "import one, two\n"
