"""``dalsegno convert``: what a person sees, and one line for each failure."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from rich.console import Console

from dalsegno.agent.commands import convert_command, dalsegno
from dalsegno.elastic.universal import convert_directory
from tests.support.checkpoints.conversions import files_below
from tests.support.workers.zero_runs import Sources

pytestmark = pytest.mark.timeout(120)
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Exit code, standard output and standard error of one command line."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code = dalsegno.run(["convert", *map(str, arguments)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_a_checkpoint_of_deepspeeds(sources: Sources, tmp_path: Path, run: Run) -> None:
    """The real thing, in a process of its own, with wishes: the files of the library's call, and a line about them."""
    source = tmp_path / "global_step3"
    shutil.copytree(sources.get(2, 2)[0], source, ignore=shutil.ignore_patterns("MANIFEST.json"))
    flags = ["--threads", 2, "--memory", "1M", "--stage", 3, "--reset-optimizer", "--allow", "argparse.Namespace"]
    code, out, err = run(*flags, "--no-latest", source, tmp_path / "universal")
    assert (code, err) == (0, "")
    from dalsegno.elastic.universal import Wish

    made = convert_directory(source, tmp_path / "other", wish=Wish(stage=3, reset_optimizer=True), latest=False)
    size = sum(entry.size for entry in made) / 1e6
    assert out.startswith(f"{tmp_path / 'universal'}: {len(made)} files, {size:.1f} MB, in ")
    assert files_below(tmp_path / "universal") == files_below(tmp_path / "other")
    assert not (tmp_path / "latest_universal").exists()


def test_numpys_values_in_a_client_state(sources: Sources, tmp_path: Path, run: Run) -> None:
    """A metric, and a generator's state: what scripts put there ended the conversion, and with it each other world."""
    source = tmp_path / "global_step3"
    shutil.copytree(sources.get(2, 2)[0], source, ignore=shutil.ignore_patterns("MANIFEST.json"))
    state = {"best": numpy.float64(0.25), "numpy": numpy.random.RandomState(3).get_state()}
    for path in source.glob("*_model_states.pt"):
        torch.save({**torch.load(path, weights_only=False), **state}, path)
    code, _, err = run("--no-latest", source, tmp_path / "universal")
    assert (code, err) == (0, "")
    (made,) = (tmp_path / "universal").glob("mp_rank_*_model_states.pt")
    found = torch.load(made, weights_only=False)
    assert found["best"] == 0.25
    assert [type(one) for one in found["numpy"]] == [type(one) for one in state["numpy"]]
    assert numpy.array_equal(found["numpy"][1], state["numpy"][1])


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[Path, Path]]:
    """Puts a program in the converter's place; source and target directories for it."""

    def fake(program: str) -> tuple[Path, Path]:
        (tmp_path / "fake_converter.py").write_text(program)
        (tmp_path / "source").mkdir()
        monkeypatch.setattr(convert_command, "_MODULE", "fake_converter")
        # Nothing is taken from the working directory.
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))
        monkeypatch.chdir(tmp_path)
        return tmp_path / "source", tmp_path / "target"

    return fake


FAILURES = {
    "source": (
        'print(\'{"state": "SOURCE_BAD", "message": "a file is missing"}\'); raise SystemExit(65)',
        "dalsegno: error: a file is missing\n",
    ),
    "environment": (
        'print(\'{"files_done": 1, "files_total": 2}\\n{"state": "ENVIRONMENT", "message": "no space"}\');'
        " raise SystemExit(74)",
        "dalsegno: error: no space\n",
    ),
    "environment, where a site prints": (
        r"""print('loading modules\n{"state": "ENVIRONMENT", "message": "no space"}'); raise SystemExit(74)""",
        "dalsegno: error: no space\n",
    ),
    "killed": (
        "import os; os.kill(os.getpid(), 9)",
        "dalsegno: error: the converter was killed, perhaps because memory was short; the same command goes on from "
        "here\n",
    ),
    "bus error": (
        "import os, signal; os.kill(os.getpid(), signal.SIGBUS)",
        "dalsegno: error: the converter was killed by signal 7 (SIGBUS); the same command goes on from here\n",
    ),
    "crashed": (
        "import sys; print('noise', file=sys.stderr); raise ValueError('what went wrong')",
        "dalsegno: error: the converter failed: ValueError: what went wrong\n",
    ),
}


@pytest.mark.parametrize("failure", list(FAILURES))
def test_one_line_for_each_failure(fake: Any, run: Run, failure: str) -> None:
    """Whatever happens to the converter."""
    program, line = FAILURES[failure]
    assert run(*fake(program)) == (1, "", line)


def test_complete_already(fake: Any, run: Run) -> None:
    code, out, err = run(*fake('print(\'{"state": "READY", "message": "out was complete already"}\')'))
    assert (code, out, err) == (0, "out was complete already\n", "")


def test_a_bar_on_a_terminal(fake: Any, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes, of how many, and files; nothing of it where there is no terminal."""
    lines = [
        {"bytes_done": 1_000_000},
        {"bytes_total": 4_000_000},
        {"files_done": 3, "files_total": 9},
        {"bytes_done": 2_000_000},
        {"state": "READY", "message": "done"},
    ]
    screen = io.StringIO()
    monkeypatch.setattr(convert_command, "Console", lambda stderr: Console(file=screen, force_terminal=True, width=120))
    code, out, err = run(*fake(f"for line in {[json.dumps(line) for line in lines]!r}: print(line)"))
    assert (code, out, err) == (0, "done\n", "")
    assert "file 3 of 9" in screen.getvalue()
    assert "2.0/4.0 MB" in screen.getvalue()


def test_interrupted(fake: Any, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The converter ends with the command, as shells say it, and the same command goes on."""
    source, target = fake("import os, time; print(os.getpid(), flush=True); time.sleep(60)")

    def interrupt(process: Any) -> None:
        pids.append(int(process.stdout.readline()))
        raise KeyboardInterrupt

    pids: list[int] = []
    monkeypatch.setattr(convert_command, "_follow", interrupt)
    assert run(source, target) == (130, "", "dalsegno: interrupted; the same command goes on from here\n")
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--threads", "0"], "threads must be at least 1"),
        (["--memory", "1K"], "need at least 65536 bytes"),
        (["--memory", "much"], "'much' is not a size like 64M"),
        (["--stage", "0"], "invalid choice: 0"),
    ],
)
def test_bad_flags(tmp_path: Path, run: Run, flags: list[str], words: str) -> None:
    code, out, err = run(*flags, tmp_path, tmp_path / "target")
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1
    assert not (tmp_path / "target").exists()


def test_no_such_source(tmp_path: Path, run: Run) -> None:
    assert run(tmp_path / "a", tmp_path / "b") == (2, "", f"dalsegno: error: {tmp_path / 'a'} is no directory\n")


def test_without_the_extra(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a base install it says which extra is missing."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "deepspeed" else find(name))
    code, _, err = run(tmp_path, tmp_path / "target")
    assert (code, err) == (2, "dalsegno: error: converting needs deepspeed: pip install 'dalsegno[train]'\n")


@pytest.mark.parametrize(("text", "size"), [("1000", 1000), ("64K", 65536), ("2MiB", 2 << 20), ("1 g", 1 << 30)])
def test_sizes(text: str, size: int) -> None:
    assert convert_command._bytes(text) == size
