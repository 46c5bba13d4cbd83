"""DeepSpeed's configuration in workers that are to load universal files, whose script does not say so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dalsegno.agent.standby.hooks import arguments_for

SCRIPT = """
import sys, deepspeed
engine = deepspeed.Engine({"stage": 1})
print(engine.load_universal, sys.argv[1:], __name__)
if "fail" in sys.argv:
    raise ValueError("mine")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script, and a package that reads its configuration as DeepSpeed does."""
    runtime = tmp_path / "deepspeed" / "runtime"
    runtime.mkdir(parents=True)
    (runtime / "__init__.py").touch()
    (runtime / "config.py").write_text(
        "class DeepSpeedConfig:\n    def __init__(self, given, mpu=None):\n"
        "        self.load_universal_checkpoint = given.get('checkpoint', {}).get('load_universal', False)\n"
    )
    (tmp_path / "deepspeed" / "__init__.py").write_text(
        "from .runtime.config import DeepSpeedConfig\nclass Engine:\n    def __init__(self, given):\n"
        "        self.load_universal = DeepSpeedConfig(given, mpu=None).load_universal_checkpoint\n"
    )
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


def run(script: Path, *words: str, universal: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=script.parent,
        env={**os.environ, "PYTHONPATH": str(script.parent), "DALSEGNO_DEEPSPEED_LOAD_UNIVERSAL": universal},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("words", [("train.py",), ("-m", "train")])
def test_a_fresh_interpreter_runs_the_script_as_it_would(script: Path, words: tuple[str, ...]) -> None:
    """Only DeepSpeed reads another configuration; its errors are its own."""
    assert run(script, "-u", *words, "--x", "1").stdout == "False ['--x', '1'] __main__\n"
    changed = run(script, *arguments_for(("-u", *words, "--x", "1")), universal="1")
    assert changed.stdout == "True ['--x', '1'] __main__\n"
    failed = run(script, *arguments_for(("-u", *words, "fail")), universal="1")
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[-1] == "ValueError: mine"
    assert "hooks.py" not in failed.stderr


def test_what_was_imported_before_is_changed_too(script: Path) -> None:
    """As in a worker that is forked from a process that has imported DeepSpeed."""
    load = "from dalsegno.agent.standby.load_universal import install; install()"
    code = f"import deepspeed; {load}; exec(open('train.py').read())"
    assert run(script, "-c", code).stdout == "True [] __main__\n"
