"""An overlay comes to the given objects, whatever has to be added, changed or taken away."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from dalsegno.agent.deploy.kubernetes import objects
from dalsegno.agent.deploy.kustomize import base, overlay
from tests.support.deploy import AUTOSCALED, ETCD, FULL, TLS, job
from tests.unit.agent.deploy.test_committed import built

# Selectors of nodes are mappings that no list is around: one is taken away, one changed, and its key has a slash in it.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "etcd": ETCD,
    "tls": TLS,
    "full": {**FULL, "namespace": None},
    "autoscaled": AUTOSCALED,
    "one": {"node_selector": {"cloud/pool~a": "1"}},
    "two": {"node_selector": {"cloud/pool~a": "2"}},
}


@pytest.mark.parametrize(("below", "above"), list(itertools.permutations(KINDS, 2)))
def test_an_overlay_makes_one_job_of_another(tmp_path: Path, below: str, above: str) -> None:
    """From each kind of job to each other one."""
    old, new = (objects(job(**KINDS[name])) for name in (below, above))
    for folder, files in (("base", base(old)), ("over", overlay(old, new, "../base"))):
        (tmp_path / folder).mkdir()
        for name, text in files.items():
            (tmp_path / folder / name).write_text(text)
    found = {(one["kind"], one["metadata"]["name"]): one for one in built(tmp_path / "over")}
    assert found == {(one["kind"], one["metadata"]["name"]): one for one in new}
