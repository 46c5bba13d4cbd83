"""`--universal-checkpoint` and the script's own arguments."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dalsegno.agent.elastic_agent import ElasticAgent
from dalsegno.protos import control_pb2


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
