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


ENGINE = """
class DeepSpeedEngine:
    def __init__(self, module, optimizer, stage, rank):
        self.module, self.optimizer, self.stage, self.global_rank = module, optimizer, stage, rank

    def zero_optimization_stage(self):
        return self.stage

    def load_checkpoint(self, load_dir, tag=None):
        return load_dir, (load_dir and {})
"""
LOADING = """
import sys, types, torch
from deepspeed.runtime.engine import DeepSpeedEngine
norm, frozen, plain = torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2).requires_grad_(False), torch.nn.Linear(2, 2)
plain.register_buffer("made_anew", torch.ones(1), persistent=False)


def optimizer(groups, *steps):
    # Of stage 3, of which each piece of a parameter group has a state of its own.
    states = {number: {"step": step} if step is not None else {} for number, step in enumerate(steps)}
    return types.SimpleNamespace(optimizer=types.SimpleNamespace(param_groups=[{}] * groups, state=states))


shared = torch.ones(())
one, two = optimizer(1, torch.ones(()), torch.ones(())), optimizer(2, shared, shared)
pieces = optimizer(1, shared, shared, None)
both = torch.nn.Sequential(norm, frozen)
cases = [(norm, None, 1, 0), (both, two, 3, 0), (norm, two, 3, 1), (plain, one, 3, 0), (plain, pieces, 3, 0)]
for case in cases:
    assert DeepSpeedEngine(*case).load_checkpoint("here") == ("here", {})
assert DeepSpeedEngine(norm, None, 1, 0).load_checkpoint(None) == (None, None)
sys.modules["dalsegno.elastic.deepspeed.loading"] = types.ModuleType("ours")
DeepSpeedEngine(norm, None, 1, 0).load_checkpoint("here")
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
    (runtime / "engine.py").write_text(ENGINE)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


def run(script: Path, *words: str, universal: str = "") -> subprocess.CompletedProcess[str]:
    path = filter(None, [os.environ.get("PYTHONPATH")])
    return subprocess.run(
        [sys.executable, *words],
        cwd=script.parent,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(script.parent), *path]),
            "DALSEGNO_DEEPSPEED_LOAD_UNIVERSAL": universal,
        },
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


@pytest.mark.slow
def test_what_deepspeed_leaves_out_is_told(script: Path) -> None:
    """Once for a load, by rank 0, of what the model has, and not where our own loading repairs it."""
    script.write_text(LOADING)
    assert not run(script, "-u", "train.py").stderr
    done = run(script, *arguments_for(("-u", "train.py")), universal="1")
    assert done.returncode == 0, done.stderr
    start, end = "dalsegno: DeepSpeed does not load all from universal files: ", "in docs/scripts.md"
    said = [line for line in done.stderr.splitlines() if line.startswith(start) and line.endswith(end)]
    steps = "the optimizer's pieces count their steps together: see"
    groups = f"; all parameter groups have the first one's settings; {steps}"
    assert len(said) == len(done.stderr.splitlines()) == 3
    assert f"{start}buffers keep the values that the script gave them: see" in said[0]
    assert f"{start}buffers and frozen parameters keep the values that the script gave them{groups}" in said[1]
    assert f"{start}{steps}" in said[2]
