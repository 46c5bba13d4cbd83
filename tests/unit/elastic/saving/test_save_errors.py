"""Which failures of a save are tried again, and which end the run at once: on all ranks alike."""

from __future__ import annotations

import errno
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from dalsegno.elastic import SaveError
from dalsegno.elastic.checkpoint import CheckpointStore, Position
from dalsegno.elastic.rank.collective import Solo
from dalsegno.elastic.rank.identity import Identity
from dalsegno.elastic.saving import save_errors
from dalsegno.elastic.saving.save_errors import Cause, is_fatal, problem
from dalsegno.elastic.saving.saving import Content, Saver

FULL = OSError(errno.ENOSPC, "No space left on device")
SURROUNDINGS, LIKELY, MISTAKE = Cause.SURROUNDINGS, Cause.LIKELY_MISTAKE, Cause.MISTAKE


def by_dcp(*errors: BaseException) -> CheckpointException:
    """What torch's distributed checkpoint raises when ranks 1, 2, … could not write."""
    return CheckpointException(
        "write", {rank: (error, traceback.StackSummary()) for rank, error in enumerate(errors, 1)}
    )


def chained(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (FULL, SURROUNDINGS),
        (OSError(errno.EIO, "Input/output error"), SURROUNDINGS),
        (MemoryError(), SURROUNDINGS),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), SURROUNDINGS),
        (RuntimeError("unable to mmap 4096 bytes: Cannot allocate memory (12)"), SURROUNDINGS),
        (RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0"), SURROUNDINGS),
        (RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"), SURROUNDINGS),
        (chained(RuntimeError("could not save"), FULL), SURROUNDINGS),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "sub/model.pt"), LIKELY),
        (PermissionError(errno.EACCES, "Permission denied", "elsewhere/model.pt"), LIKELY),
        (RuntimeError("Optimizer state has not been consolidated on this rank."), LIKELY),
        (RuntimeError("Parent directory /nowhere does not exist."), LIKELY),
        (TypeError("cannot pickle '_thread.lock' object"), MISTAKE),
        (KeyError("modle"), MISTAKE),
        (by_dcp(FULL), SURROUNDINGS),
        (by_dcp(RuntimeError("the others went"), FULL), SURROUNDINGS),
        (by_dcp(FULL, TypeError("a lambda")), MISTAKE),
        (by_dcp(RuntimeError("odd")), LIKELY),
    ],
    ids=str,
)
def test_a_mistake_is_told_from_the_surroundings(tmp_path: Path, error: BaseException, wanted: Cause) -> None:
    """The disk is well here, so only what the error itself says counts."""
    found = problem(error, tmp_path)
    assert found is not None
    assert found.cause is wanted
    assert "\n" not in found.text


@pytest.mark.parametrize("error", [RuntimeError("file not ready"), FileNotFoundError(errno.ENOENT, "No such file")])
def test_while_nothing_can_be_written_it_is_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Libraries hide what the file system said; it is asked itself."""
    monkeypatch.setattr(save_errors, "write_problem", lambda path: "No space left on device")
    found = problem(error, tmp_path)
    assert found is not None
    assert found.cause is SURROUNDINGS
    assert isinstance(error, OSError) or found.text == "No space left on device; RuntimeError: file not ready"


@pytest.mark.parametrize(
    ("causes", "fatal"),
    [
        ([], False),
        ([None], False),
        ([SURROUNDINGS], False),
        ([LIKELY, SURROUNDINGS], False),
        ([LIKELY, None], False),
        ([LIKELY], True),
        ([LIKELY, LIKELY], True),
        ([MISTAKE, SURROUNDINGS], True),
    ],
)
def test_what_may_come_from_another_ranks_disk_is_not_fatal(causes: list[Cause | None], fatal: bool) -> None:
    """A rank that waits for one whose disk is full fails with something else."""
    answers: list[dict[str, Any]] = [{"text": "x"} if c is None else {"text": "x", "cause": c.value} for c in causes]
    assert is_fatal([{}, *answers]) == fatal


def saver(directory: Path) -> Saver:
    return Saver(Identity(run_dir=directory), Solo(), CheckpointStore(directory), None, None)


@pytest.mark.parametrize("error", [FULL, by_dcp(FULL)], ids=str)
def test_a_full_disk_costs_that_save_only(tmp_path: Path, error: BaseException) -> None:
    """Also where torch's distributed checkpoint says so, which is no `Exception`."""

    def write(path: Path) -> None:
        raise error

    assert saver(tmp_path).save(Content(1, Position()), write, create_directory=True, drain=False) is None
    assert not list(tmp_path.glob("step-*"))


@pytest.mark.parametrize("error", [RuntimeError("not consolidated"), by_dcp(TypeError("a lambda"))], ids=str)
def test_a_mistake_ends_the_run_at_the_first_save(tmp_path: Path, error: BaseException) -> None:
    """It would only be repeated, and no checkpoint ever come of it."""

    def write(path: Path) -> None:
        raise error

    with pytest.raises(SaveError, match=r"saving step 1 failed: (RuntimeError: not consol|TypeError: a lambda)"):
        saver(tmp_path).save(Content(1, Position()), write, create_directory=True, drain=False)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(83)], ids=repr)
def test_who_ends_the_process_is_not_kept_from_it(tmp_path: Path, error: BaseException) -> None:
    """Only an error of saving is shared with the others."""

    def write(path: Path) -> None:
        raise error

    with pytest.raises(type(error)):
        saver(tmp_path).save(Content(1, Position()), write, create_directory=True, drain=False)
