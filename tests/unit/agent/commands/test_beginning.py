"""What an agent begins with before it imports torch."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dalsegno.agent.commands import launch
from dalsegno.agent.commands.arguments import parse
from dalsegno.agent.commands.beginning import kept_back, made_directories, nursery_spec, script_of
from dalsegno.agent.script import modules_of
from dalsegno.agent.shell import console
from dalsegno.protos.contract import Variable
from dalsegno.protos.options import UsageError

LOG = Path("standby.log")


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("import transformers\n")
    return str(path)


@pytest.mark.slow
def test_it_needs_neither_torch_nor_grpc() -> None:
    """Else the nursery would wait for them, and gRPC would take its settings too early."""
    code = "import sys, dalsegno.agent.commands.beginning; print(sorted({'torch', 'grpc', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("flags", [(), ("-m",), ("--no-python",)])
@pytest.mark.parametrize("interpreter", ["", "/usr/bin/another"])
def test_it_composes_the_script_as_torch_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, flags: tuple[str, ...], interpreter: str
) -> None:
    if interpreter:
        monkeypatch.setenv("PYTHON_EXEC", interpreter)
    options = parse(["--job-id=job", *flags, script, "--own", "1"], {})
    assert script_of(options) == launch._torch_config(options, tmp_path)[1]


def test_the_nursery_gets_what_the_pool_would_give_it(script: str) -> None:
    """Its modules follow from the script's text."""
    spec = nursery_spec(parse(["--job-id=job", script], {}), LOG, (15, 2), {"HOME": "here"})
    assert spec is not None
    assert (spec.modules, spec.log, spec.notices) == (modules_of(Path(script)), LOG, (15, 2))
    assert "transformers" in spec.modules
    assert (spec.environment, spec.python, spec.single) == ({"HOME": "here"}, sys.executable, False)


@pytest.mark.parametrize("flags", [("--no-python",), ("--virtual-local-rank",), ("--numa-binding=node",)])
def test_where_nothing_is_forked_there_is_none(script: str, flags: tuple[str, ...]) -> None:
    assert nursery_spec(parse(["--job-id=job", *flags, script], {}), LOG, (), {}) is None


def test_people_hear_which_imports_are_not_made_ahead(tmp_path: Path) -> None:
    """And what to do about it; where nothing is made ahead there is nothing to say."""
    own = tmp_path / "own.py"
    own.write_text('import os\nos.environ["HF_HUB_CACHE"] = os.environ["HF_HOME"] = "/8"\nimport transformers\n')
    (line,) = kept_back(parse(["--job-id=job", str(own)], {}))
    assert line.startswith("the script sets HF_HOME, HF_HUB_CACHE before its imports, which read that: ")
    assert not kept_back(parse(["--job-id=job", "--virtual-local-rank", str(own)], {}))
    own.write_text("import torch\n")
    assert not kept_back(parse(["--job-id=job", str(own)], {}))


@pytest.mark.parametrize(("nproc", "given", "threads"), [("1", "", None), ("2", "", "1"), ("2", "4", "4")])
def test_its_threads_are_those_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, nproc: str, given: str, threads: str | None
) -> None:
    """Torch sets their number for several workers, and a library reads it only once. The pool would refuse another."""
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    if not given:
        monkeypatch.delenv("OMP_NUM_THREADS")
    options = parse(["--job-id=job", f"--nproc-per-node={nproc}", script], {})
    spec = nursery_spec(options, LOG, (), os.environ)
    assert spec is not None
    assert spec.environment.get("OMP_NUM_THREADS") == threads
    launch._torch_config(options, tmp_path)
    assert os.environ.get("OMP_NUM_THREADS") == threads


def test_cards_are_counted_as_torch_would(script: str) -> None:
    """What the environment hides does not count; without any, "auto" means the cores."""
    hidden = parse(["--job-id=job", "--nproc-per-node=auto", script], {})
    spec = nursery_spec(hidden, LOG, (), {"CUDA_VISIBLE_DEVICES": ""})
    assert spec is not None
    assert (spec.environment.get("OMP_NUM_THREADS") == "1") == (len(os.sched_getaffinity(0)) > 1)


def test_torchs_log_goes_to_ours_once_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file, one handler: two of them would rotate it under each other."""
    ours, theirs = logging.getLogger("dalsegno"), logging.getLogger("torch.distributed")
    for logger in (ours, theirs):
        monkeypatch.setattr(logger, "handlers", [])
        monkeypatch.setattr(logger, "propagate", True)
    console.set_up_logging(tmp_path / "agent.log", lambda: "here", ("dalsegno",))
    assert theirs.handlers == []
    console.log_torch()
    assert (theirs.handlers, theirs.propagate) == (ours.handlers, False)
    ours.handlers[0].close()


@pytest.mark.parametrize("flag", ["--log-dir", "--trace-dir", "--checkpoint-dir"])
def test_a_directory_that_cannot_be_made_is_named_with_its_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    """The system's error names neither, and says nothing of what to do."""
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(UsageError) as error:
        made_directories(parse(["--job-id=job", f"{flag}=file/x", "x.py"], {}))
    text = str(error.value)
    assert all(part in text for part in (flag, "file/x cannot be written (Not a directory)", "choose another")), text
    assert "Errno" not in text


def test_a_directory_for_marks_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """Else the run would go on without marks, and only a log would say so."""
    with pytest.raises(UsageError, match=r"^--trace-dir: /sys cannot be written \(.*\); choose another, or make it wr"):
        made_directories(parse(["--job-id=job", f"--checkpoint-dir={tmp_path}", "--trace-dir=/sys", "x.py"], {}))
    assert not os.environ.get(Variable.TRACE)


@pytest.mark.parametrize("below", ["", "/x"])
@pytest.mark.parametrize("flag", ["--log-dir", "--trace-dir", "--checkpoint-dir"])
def test_a_link_to_what_is_not_there_is_named_with_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str, below: str
) -> None:
    """As of a volume that is not mounted: no permission is wrong, and no file "exists"."""
    monkeypatch.chdir(tmp_path)
    Path("link").symlink_to("/gone/volume")
    with pytest.raises(UsageError) as error:
        made_directories(parse(["--job-id=job", f"{flag}=link{below}", "x.py"], {}))
    assert str(error.value) == (
        f"{tmp_path}/link is a link to /gone/volume, which is not there: mount or make that, or choose another {flag}"
    )


def test_without_a_place_for_temporary_files_the_way_out_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's own line names neither --log-dir nor TMPDIR."""
    monkeypatch.chdir(tmp_path)

    def fails(prefix: str) -> str:
        raise PermissionError(13, "Permission denied", "/tmp/x")

    monkeypatch.setattr(tempfile, "mkdtemp", fails)
    with pytest.raises(UsageError, match=r"\(Permission denied\): choose another TMPDIR, or give --log-dir$"):
        made_directories(parse(["--job-id=job", "x.py"], {}))
