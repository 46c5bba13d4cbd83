"""What an agent believes of its workers' messages."""

from __future__ import annotations

from typing import Any

import pytest

from dalsegno.agent.decisions.worker_checks import MOST, checked, one_line
from dalsegno.protos import worker_pb2

NAME, DIGEST = "step-4.e1.1", "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("rank", "body"),
    [
        (1, {"progress": worker_pb2.Progress(step=MOST, loss=float("nan"), seconds=1.0, longest=86400.0, beats=MOST)}),
        (1, {"saving": worker_pb2.Saving(name=NAME, bytes=MOST)}),
        (0, {"sealed": worker_pb2.Sealed(name=NAME, digest=DIGEST, step=4)}),
        (1, {"save_failed": worker_pb2.SaveFailed(reason="disk full")}),
        (1, {"draining": worker_pb2.Draining(step=4)}),
        (1, {"drained": worker_pb2.Drained(name=NAME, digest=DIGEST, step=4)}),
        (1, {"drained": worker_pb2.Drained(step=4)}),
        (1, {"finished": worker_pb2.Finished(step=4)}),
        (1, {"bad_checkpoint": worker_pb2.BadCheckpoint(name=NAME, digest=DIGEST, form=2, file="f", message="torn")}),
        (1, {"hello": worker_pb2.Hello(epoch=1)}),
        (1, {}),
    ],
    ids=str,
)
def test_what_workers_say_passes_unchanged(rank: int, body: dict[str, Any]) -> None:
    """A diverged loss, an empty name where there is none, and a word that this version does not know among it."""
    message = worker_pb2.ToAgent(**body)
    before = message.SerializeToString()
    assert checked(message, rank).SerializeToString() == before


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"progress": worker_pb2.Progress(step=MOST + 1)}, "step"),
        ({"progress": worker_pb2.Progress(beats=2**64 - 1)}, "beats"),
        ({"progress": worker_pb2.Progress(seconds=float("nan"))}, "seconds"),
        ({"progress": worker_pb2.Progress(longest=float("inf"))}, "longest"),
        ({"progress": worker_pb2.Progress(longest=-1.0)}, "longest"),
        ({"saving": worker_pb2.Saving(name=NAME, bytes=2**63)}, "bytes"),
        ({"saving": worker_pb2.Saving(name="../../etc")}, "name"),
        ({"sealed": worker_pb2.Sealed(name=NAME, digest=DIGEST)}, "rank 0"),
        ({"draining": worker_pb2.Draining(step=2**64 - 1)}, "step"),
        ({"drained": worker_pb2.Drained(name=NAME)}, "digest"),
        ({"drained": worker_pb2.Drained(name=NAME, digest=DIGEST.upper())}, "digest"),
        ({"drained": worker_pb2.Drained(name="step-1.e1.1/..", digest=DIGEST)}, "name"),
        ({"finished": worker_pb2.Finished(step=2**63)}, "step"),
        ({"save_failed": worker_pb2.SaveFailed(name="x")}, "name"),
        ({"bad_checkpoint": worker_pb2.BadCheckpoint(name="", digest=DIGEST)}, "name"),
    ],
    ids=str,
)
def test_what_no_worker_says(body: dict[str, Any], named: str) -> None:
    """Refused, with the field's name."""
    with pytest.raises(ValueError, match=named):
        checked(worker_pb2.ToAgent(**body), 1)


def test_another_rank_seals_where_rank_0_may_be_gone() -> None:
    """Only if the agent has asked for it."""
    message = worker_pb2.ToAgent(sealed=worker_pb2.Sealed(name=NAME, digest=DIGEST, seconds=3.0))
    assert checked(message, 1, seals=True) is message
    message.sealed.seconds = -1.0
    with pytest.raises(ValueError, match="seconds"):
        checked(message, 1, seals=True)


def test_texts_become_one_line() -> None:
    """Newlines, escapes and length are nothing for a log or a terminal."""
    assert one_line("No space left\n  on device\x1b[2J\0\u202e") == "No space left on device\ufffd[2J\ufffd\ufffd"
    assert one_line("x" * 10**6) == "x" * 999 + "…"
    failed = worker_pb2.ToAgent(save_failed=worker_pb2.SaveFailed(name=NAME, reason="a\nb"))
    assert checked(failed, 1).save_failed.reason == "a b"
    saving = worker_pb2.ToAgent(saving=worker_pb2.Saving(name=NAME, problem="a\nb"))
    assert checked(saving, 1).saving.problem == "a b"
    bad = worker_pb2.BadCheckpoint(name=NAME, digest=DIGEST, file="f\n", message="m\x07")
    cleaned = checked(worker_pb2.ToAgent(bad_checkpoint=bad), 1).bad_checkpoint
    assert (cleaned.file, cleaned.message) == ("f", "m\ufffd")
