"""`--universal-checkpoint` and the script's own arguments."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dalsegno.agent.commands import launch
from dalsegno.agent.commands.arguments import parse
from dalsegno.agent.script import Script
from dalsegno.agent.shell.elastic_agent import ElasticAgent
from dalsegno.protos import control_pb2

NOTHING = Script(sys.executable, ())


@pytest.mark.parametrize(
    ("job", "takes_it", "form", "given"),
    [
        (True, True, control_pb2.FORM_UNIVERSAL, True),
        (True, True, control_pb2.FORM_SHARDED, False),
        (True, False, control_pb2.FORM_UNIVERSAL, False),
        (False, True, control_pb2.FORM_UNIVERSAL, False),
    ],
)
def test_the_jobs_universal_checkpoint_flag_counts(
    job: bool, takes_it: bool, form: control_pb2.Form.ValueType, given: bool
) -> None:
    """All nodes hand it to their scripts or none, whatever each was told; only on a resume from universal files."""
    agent = SimpleNamespace(
        _use_flag=takes_it,
        _effects=SimpleNamespace(settings=control_pb2.Settings(universal_checkpoint=job)),
        _script=SimpleNamespace(arguments=("--lr=1",), own=("--lr=1",)),
    )
    world = control_pb2.World(epoch=2, resume=control_pb2.ResumePoint(form=form))
    arguments = ElasticAgent._arguments(agent, world)  # type: ignore[arg-type]
    assert arguments == (("--lr=1", "--universal-checkpoint") if given else ("--lr=1",))


@pytest.mark.parametrize(
    ("own", "given"),
    [
        ([], False),
        (["--universal-checkpoint"], True),
        (["--universal-checkpoint", "--lr=1"], True),
        (["--universal_checkpoint", "true"], True),
        (["--universal-checkpoint=false"], False),
        (["--universal_checkpoint", "False", "x"], False),
        (["--universal-checkpoints"], False),
    ],
)
def test_a_script_that_is_told_from_the_beginning_means_the_job(tmp_path: Path, own: list[str], given: bool) -> None:
    options = parse(["--nnodes=1:2", "train.py", *own], {})
    options.job_id = "job"
    config = launch._agent_config(options, 1, SimpleNamespace(root=tmp_path), tmp_path, NOTHING)  # type: ignore[arg-type]
    assert config.settings.universal_checkpoint is given


@pytest.mark.parametrize(
    ("text", "own", "may_call"),
    [
        ("import dalsegno.elastic", [], True),
        ("def main():\n    from dalsegno import elastic", [], True),
        ("from dalsegno.swift_plugin import hf", [], True),
        ("# as with dalsegno.elastic\nimport torch", [], False),
        ("import dalsegno_elastic", [], False),
        ("", ["--external_plugins", "a/dalsegno_swift_plugin.py"], True),
    ],
)
def test_a_scripts_own_text_says_that_it_may_call_session(
    tmp_path: Path, text: str, own: list[str], may_call: bool
) -> None:
    """An import counts, anywhere in it; no other mention does."""
    path = tmp_path / "train.py"
    path.write_text(text)
    options = parse(["--nnodes=1:2", str(path), *own], {})
    options.job_id = "job"
    script = Script(sys.executable, ("-u", str(path), *own))
    config = launch._agent_config(options, 1, SimpleNamespace(root=tmp_path), tmp_path, script)  # type: ignore[arg-type]
    assert config.expects_session is may_call
