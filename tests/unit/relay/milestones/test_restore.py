"""What a download that fails is told as: the hub's silence, or the volume's."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dalsegno.protos.options import UsageError
from dalsegno.relay.milestones import restore as module
from dalsegno.relay.milestones import transfer
from dalsegno.relay.milestones.commander_client import Milestone
from dalsegno.relay.milestones.restore import (
    HubUnusable,
    RevisionRefused,
    Unreachable,
    VolumeFull,
    baseline,
    restore,
    restore_newest,
)
from dalsegno.relay.milestones.run_manifest import MANIFEST_PATH

TOLD = Milestone("me/tune", "abc", 40, "step-40.e1.0", "digest")
WAYS: dict[str, Callable[[Path], object]] = {
    "a milestone": lambda folder: restore(TOLD, folder / "ckpt", folder / "hf"),
    "a baseline": lambda folder: baseline("me/tune@abc", folder / "hf"),
}


class Transfer:
    """A download that ends as the test says, without a byte."""

    outcome: ClassVar[dict[str, Any]] = {}

    def __init__(self, job: object, environment: object) -> None:
        pass

    def __enter__(self) -> Transfer:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def result(self, *_: object) -> dict[str, Any]:
        return self.outcome


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("error", "raised", "line"),
    [
        (
            OSError(errno.ENOSPC, "6.0 MB are to come"),
            VolumeFull,
            r"is full: me/tune@abc: 6\.0 MB .*: make room",
        ),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), VolumeFull, "the volume is full: .*quota"),
        (OSError(errno.EIO, "Input/output error"), OSError, "me/tune@abc: Input/output error"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), Unreachable, "me/tune@abc: .*refused"),
        (RuntimeError("500"), Unreachable, "me/tune@abc: 500"),
    ],
)
def test_whose_failure_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, error: Exception, raised: type[Exception], line: str
) -> None:
    """A hub is waited for, and `--allow-baseline` named; a volume without room is a person's, and keeps what came."""
    outcome = {"failed": transfer._clean(error, ""), "errno": transfer._of_volume(error), "xet": False}
    monkeypatch.setattr(module, "Transfer", type("Kind", (Transfer,), {"outcome": outcome}))
    with pytest.raises(Exception) as caught:  # noqa: PT011  # its type is what is compared
        WAYS[way](tmp_path)
    assert type(caught.value) is raised
    assert re.search(line, str(caught.value)), caught.value
    assert any(files for _, _, files in os.walk(tmp_path)), "what came is gone"


@pytest.mark.parametrize("way", WAYS)
def test_a_library_that_is_too_old_is_no_hub_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A person installs the extra. Waiting helps nothing, and beginning anew would throw the run away."""
    (tmp_path / "huggingface_hub").mkdir()
    # As 0.36 would: it has no name that is imported here.
    (tmp_path / "huggingface_hub" / "__init__.py").write_text("__version__ = '0.36.0'\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with pytest.raises(HubUnusable) as caught:
        WAYS[way](tmp_path / "volume")
    assert isinstance(caught.value, UsageError), "it ends a pod with a line"
    assert "me/tune@abc: cannot import name 'CommitOperationAdd' from 'huggingface_hub'" in str(caught.value)
    assert str(caught.value).endswith("needs the extra relay: pip install 'dalsegno[relay]'")


def test_a_full_volume_ends_a_pod_with_a_line() -> None:
    """As wrong input does, and as a volume without room does before that: nobody waits for a hub."""
    assert issubclass(VolumeFull, UsageError)
    assert not issubclass(VolumeFull, Unreachable)


class Downloads(Transfer):
    """Downloads that have come in whole, with a `run_manifest.json` of no run."""

    def __init__(self, job: dict[str, str], environment: object) -> None:
        Path(job["target"], MANIFEST_PATH).write_bytes(b"{}")

    def result(self, *_: object) -> dict[str, Any]:
        return {"downloaded": "abc", "paths": [MANIFEST_PATH]}


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_volume_that_fails_says_nothing_about_a_milestone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The run would go back to an older one, and what was downloaded would be gone."""

    def fail(path: Path, limit: int) -> bytes:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(module, "Transfer", Downloads)
    monkeypatch.setattr(module, "read_regular", fail)
    said: list[str] = []
    older = Milestone("me/tune", "older", 20, "step-20.e1.0", "digest")
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        restore_newest([TOLD, older], tmp_path / "ckpt", tmp_path / "hf", said.append)
    assert caught.value.errno == number
    assert said == ["restoring step 40 from me/tune@abc"]
    assert len(list(tmp_path.rglob(MANIFEST_PATH))) == 1, "what came is gone"


@pytest.mark.parametrize("there", ["a link", "nothing"])
def test_a_checkpoint_without_its_own_manifest_is_no_fault_of_the_volume(tmp_path: Path, there: str) -> None:
    """It counted as one, and each start ended there."""
    if there == "a link":
        (tmp_path / "MANIFEST.json").symlink_to("elsewhere")
    with pytest.raises(ValueError, match=r"MANIFEST\.json"):
        module._place(tmp_path, module.RunManifest.__new__(module.RunManifest), tmp_path / "ckpt")


@pytest.mark.parametrize("there", ["something else", "a link", "nothing"])
def test_a_milestone_without_its_manifest_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str
) -> None:
    """The older one is tried: no other look would find this one whole."""

    class Kind(Downloads):
        def __init__(self, job: dict[str, str], environment: object) -> None:
            super().__init__(job, environment)
            path = Path(job["target"], MANIFEST_PATH)
            if there != "something else":
                path.unlink()
            if there == "a link":
                path.symlink_to("elsewhere")

    monkeypatch.setattr(module, "Transfer", Kind)
    with pytest.raises(RevisionRefused, match=f"me/tune@abc: {MANIFEST_PATH}: "):
        restore(TOLD, tmp_path / "ckpt", tmp_path / "hf")
    assert not list(tmp_path.rglob(MANIFEST_PATH))
