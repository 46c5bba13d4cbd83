"""The shape of what comes in, before the brain hears of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.master.brain.door import (
    LONGEST_SECONDS,
    MOST,
    MOST_REMEMBERED,
    MOST_SETTING,
    MOST_WORKERS,
    ShapeError,
    admit,
)
from dalsegno.protos import control_pb2 as pb
from dalsegno.protos.limits import MESSAGE_BYTES, MOST_CHECKPOINTS
from dalsegno.protos.text import one_line
from tests.support.jobs.master_process import settings

REQUESTS = [getattr(pb, method.input_type.name) for method in pb.DESCRIPTOR.services_by_name["Control"].methods]
DIGEST = "0123456789abcdef" * 4
ESCAPES = "a\x1b[2Jb\nc\u202ed"


def checkpoint(step: int = 7, epoch: int = 2, **changes: Any) -> pb.Checkpoint:
    values: dict[str, Any] = {
        "ref": pb.CheckpointRef(name=f"step-{step}.e{epoch}.0", digest=DIGEST),
        "run_id": "run-0001",
        "step": step,
        "epoch": epoch,
        "form": pb.FORM_SHARDED,
        "shape": pb.Shape(world_size=2, strategy="deepspeed-zero-2"),
        "position": pb.Position(data_epoch=1, samples=99),
        "bytes": 10**13,
        "min_nodes": 1,
        "max_nodes": 4,
        "generation": 3,
    }
    return pb.Checkpoint(**(values | changes))


def register(**changes: Any) -> pb.RegisterRequest:
    values: dict[str, Any] = {
        "job_id": "job",
        "incarnation": "0123456789abcdef",
        "protocol": 1,
        "host": "gpu-7.example.org",
        "node": "gpu-7.example.org-0",
        "nproc": 8,
        "settings": settings(),
        "probe": "f00d",
        "secret": bytes(32),
        "finished_runs": ["run-0001"],
    }
    return pb.RegisterRequest(**(values | changes))


def caller(**changes: Any) -> pb.Caller:
    values: dict[str, Any] = {"job_id": "job", "node": "a", "incarnation": "i", "epoch": 1, "request": 1}
    return pb.Caller(**(values | changes))


def refusal(message: Message) -> str:
    """The line with which it is refused."""
    with pytest.raises(ShapeError) as error:
        admit(message)
    line = str(error.value)
    assert line.isprintable(), "a refusal goes into logs as it is"
    assert len(line) < 700
    return line


def test_what_agents_send_passes_as_it_is() -> None:
    """Nothing honest is refused, changed or left out."""
    universal = checkpoint(
        ref=pb.CheckpointRef(name="step-7.e2.0.universal.3", digest=DIGEST),
        form=pb.FORM_UNIVERSAL,
        source=pb.CheckpointRef(name="step-7.e2.0", digest=DIGEST),
        metric=-1.5,
        best="step-5.e1.0",
        keep=0,
    )
    honest: list[Message] = [
        register(),
        register(epoch=5, generation=9, inventory=[checkpoint(), universal], known_settings=settings()),
        register(node="", probe="", finished_runs=[]),
        pb.WatchRequest(caller=caller(epoch=0, request=0)),
        pb.JoinRequest(
            caller=caller(secret=bytes(64)),
            round=3,
            resume=pb.CheckpointRef(digest=DIGEST),
            store_host="fe80::1%eth0",
            store_port=29400,
            inventory=[checkpoint()],
            unusable=[pb.UnusableCheckpoint(name="step-7.e2.0", reason="it is empty")],
        ),
        pb.ProgressRequest(caller=caller(), step=10**9, loss=math.nan, longest=3600.0, saved_bytes=10**15),
        pb.ProgressRequest(caller=caller(), loss=math.inf),
        pb.CommitRequest(caller=caller(), checkpoint=universal, lease=3),
        pb.FailureRequest(caller=caller(), exit_code=2**32 - 1, message="ValueError: no"),
        pb.DrainedRequest(caller=caller()),
        pb.HeldRequest(caller=caller(), checkpoint=checkpoint(in_memory=True), parts=[0, 3]),
        pb.HeldRequest(caller=caller(), all=True),
        pb.DurableRequest(caller=caller(), ref=checkpoint().ref, failure="no space left on the device"),
        pb.ScaleRequest(nodes=3),
        pb.DrainNodeRequest(node="a"),
        pb.StopRequest(),
        pb.StartRequest(),
        pb.SaveNowRequest(),
        pb.EventsRequest(after=3, limit=2, wait_seconds=1.0),
        pb.StatusRequest(),
    ]
    for message in honest:
        before = message.SerializeToString(deterministic=True)
        assert admit(message) == []
        assert message.SerializeToString(deterministic=True) == before


def fields(kind: type[Message], kinds: set[int]) -> Iterator[tuple[str, ...]]:
    """Paths of all fields of these C++ types, into messages but not into lists of them."""
    for field in kind.DESCRIPTOR.fields:
        if field.cpp_type in kinds:
            yield (field.name,)
        elif field.message_type is not None and field.name not in ("inventory", "unusable", "refs"):
            for path in fields(getattr(pb, field.message_type.name), kinds):
                yield (field.name, *path)


def filled(kind: type[Message], path: tuple[str, ...], value: Any) -> Message:
    """An otherwise honest request with this value in one field."""
    message = register() if kind is pb.RegisterRequest else kind()
    if "caller" in kind.DESCRIPTOR.fields_by_name:
        message.caller.CopyFrom(caller())  # type: ignore[attr-defined]
    if isinstance(message, pb.CommitRequest | pb.HeldRequest):
        message.checkpoint.CopyFrom(checkpoint())
    inner: Any = message
    for name in path[:-1]:
        inner = getattr(inner, name)
    if isinstance(getattr(inner, path[-1]), str | bytes | int | float):
        setattr(inner, path[-1], value)
    else:
        getattr(inner, path[-1]).append(value)
    return message


NUMBERS = [
    pytest.param(kind, path, id=f"{kind.DESCRIPTOR.name}.{'.'.join(path)}")
    for kind in REQUESTS
    for path in fields(kind, {FieldDescriptor.CPPTYPE_UINT64})
]


@pytest.mark.parametrize("value", [MOST + 1, 2**62, 2**63 - 2, 2**63 - 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize(("kind", "path"), NUMBERS)
def test_no_number_comes_near_the_end_of_64_bits(kind: type[Message], path: tuple[str, ...], value: int) -> None:
    """Every 64-bit number of every request: steps, epochs, generations, leases, counts of bytes, request numbers."""
    assert path[-1] in refusal(filled(kind, path, value))


TEXTS = [
    pytest.param(kind, path, id=f"{kind.DESCRIPTOR.name}.{'.'.join(path)}")
    for kind in REQUESTS
    for path in fields(kind, {FieldDescriptor.CPPTYPE_STRING})
    if path[-1] != "secret"
]


@pytest.mark.parametrize("value", [ESCAPES, "x" * 1_000_000, "\x00", "\u2028", "a\r"], ids=ascii)
@pytest.mark.parametrize(("kind", "path"), TEXTS)
def test_no_text_brings_escapes_or_megabytes(kind: type[Message], path: tuple[str, ...], value: str) -> None:
    """Every text of every request: refused, left out, or cleaned; what passes is short and printable."""
    message = filled(kind, path, value)
    if path[-1] not in ("message", "reason", "file", "text", "save_problem", "finished_runs"):
        assert path[-1] in refusal(message)
        return
    admit(message)
    assert len(message.SerializeToString()) < 4000
    assert b"\x1b" not in message.SerializeToString()
    assert b"\n" not in str(message).replace("\n", " ").encode()


DURATIONS = [
    pytest.param(kind, path, id=f"{kind.DESCRIPTOR.name}.{'.'.join(path)}")
    for kind in REQUESTS
    for path in fields(kind, {FieldDescriptor.CPPTYPE_DOUBLE})
    if path[-1] != "loss"
]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("kind", "path"), DURATIONS)
def test_durations_and_metrics_are_finite(kind: type[Message], path: tuple[str, ...], value: float) -> None:
    """NaN compares with nothing: a deadline of NaN never comes, or always."""
    assert path[-1] in refusal(filled(kind, path, value))


def test_durations_are_bounded_and_only_two_may_be_negative() -> None:
    """-1 is "auto" or "for ever" for two settings, and nothing for the others."""
    admit(register(settings=settings(grow_interval=-1.0, grow_wait=-1.0, wait_for_nodes=-1.0)))
    assert "node_timeout" in refusal(register(settings=settings(node_timeout=-1.0)))
    assert "notice" in refusal(pb.LeaveRequest(caller=caller(), notice=-0.1))
    assert "stall_timeout" in refusal(register(settings=settings(stall_timeout=2 * LONGEST_SECONDS)))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"secret": b""}, "secret is missing"),
        ({"secret": bytes(15)}, "secret is 15 bytes"),
        ({"secret": bytes(65)}, "secret is 65 bytes"),
        ({"nproc": 0}, "nproc is 0"),
        ({"nproc": MOST_WORKERS + 1}, "nproc"),
        ({"incarnation": ""}, "incarnation is missing"),
        ({"node": "", "host": ""}, "needs a name"),
        ({"node": "../../etc"}, "node"),
        ({"node": "a/b"}, "node"),
        ({"node": " a"}, "node"),
        ({"node": "x" * 257}, "node is 257 long"),
        ({"host": "a\\b"}, "host"),
        ({"probe": "x" * 257}, "probe is 257 long"),
        ({"settings": settings((1, MOST_SETTING + 1))}, "max_nodes"),
        ({"peer_address": f"{DIGEST}@{'x' * 65536}:1"}, "peer_address is 65603 long"),
        ({"peer_address": f"{DIGEST[:63]}@10.0.0.1:7"}, "peer_address is '0123"),
        ({"peer_address": "-----BEGIN CERTIFICATE-----\nMIIB"}, "peer_address"),
        ({"peer_address": "10.0.0.1"}, "neither HOST:PORT, nor that after 64 hex digits"),
    ],
)
def test_a_registration_is_complete_and_bounded(changes: dict[str, Any], word: str) -> None:
    """One line names the field."""
    assert word in refusal(register(**changes))


def test_a_process_has_a_number_that_a_kernel_gives() -> None:
    """Masters that come later look whether it still lives."""
    admit(register(process=pb.Process(pid=2**31 - 1)))
    with pytest.raises(ShapeError, match="pid is 2147483648"):
        admit(register(process=pb.Process(pid=2**31)))


def test_a_caller_shows_who_it_is() -> None:
    """No incarnation, or a secret that cannot be one."""
    assert "incarnation is missing" in refusal(pb.HeartbeatRequest())
    assert "secret" in refusal(pb.HeartbeatRequest(caller=caller(secret=b"short")))
    assert "store_port" in refusal(pb.JoinRequest(caller=caller(), store_port=65536))
    assert "entries" in refusal(pb.PrunedRequest(caller=caller(), refs=[pb.CheckpointRef()] * 5000))


def test_nobody_lifts_the_masters_numbers_out_of_reach() -> None:
    """What an agent claims to remember counts up to a point: what follows from it leaves room for ever after."""
    message = register(epoch=MOST, generation=MOST)
    admit(message)
    assert message.epoch == message.generation == MOST_REMEMBERED
    later = register(epoch=MOST_REMEMBERED + 10**6, generation=MOST_REMEMBERED + 10**6)
    assert admit(later) == []


LIES = [
    {"step": 2**63},
    {"epoch": 2**64 - 1},
    {"generation": 2**63 - 2},
    {"bytes": 2**63},
    {"metric": math.nan},
    {"metric": math.inf},
    {"run_id": "run-\u00b2"},
    {"run_id": ""},
    {"run_id": "run-99999999999999999999"},
    {"form": 17},
    {"max_nodes": 2**32 - 1},
    {"position": pb.Position(samples=2**64 - 1)},
    {"best": "../../../etc"},
    {"ref": pb.CheckpointRef(name="step-8.e2.0", digest=DIGEST)},
    {"ref": pb.CheckpointRef(name="../../../etc", digest=DIGEST)},
    {"ref": pb.CheckpointRef(name="step-7.e2.0", digest="")},
    {"ref": pb.CheckpointRef(name="step-7.e2.0", digest="x" * 64)},
    {"ref": pb.CheckpointRef(name="step-7.e2.0.universal.3", digest=DIGEST)},
    {"ref": pb.CheckpointRef(name="step-7.e2.9999999999999999", digest=DIGEST)},
    {"shape": pb.Shape(strategy=ESCAPES)},
]


@pytest.mark.parametrize("lie", LIES, ids=str)
def test_a_lying_manifest_costs_one_entry(lie: dict[str, Any]) -> None:
    """In an inventory it is left out, with a line, and the others count; nobody commits it."""
    good = [checkpoint(5), checkpoint(6)]
    message = register(inventory=[good[0], checkpoint(**lie), good[1]])
    (line,) = admit(message)
    assert "left out" in line
    assert line.isprintable()
    assert list(message.inventory) == good
    join = pb.JoinRequest(caller=caller(), inventory=[checkpoint(**lie)])
    assert len(admit(join)) == 1
    assert not join.inventory
    refusal(pb.CommitRequest(caller=caller(), checkpoint=checkpoint(**lie)))


def test_an_inventory_is_cut_to_its_newest() -> None:
    """Whatever its order; it then fits into a message twice."""
    entries = [checkpoint(step, 1 + step // 100, best="step-1.e1.0") for step in range(1000)]
    message = register(inventory=entries[::-1])
    (line,) = admit(message)
    assert "1000" in line
    assert {entry.step for entry in message.inventory} == set(range(1000 - MOST_CHECKPOINTS, 1000))
    longest = checkpoint(
        10**15,
        10**15,
        source=pb.CheckpointRef(name="step-1000000000000000.e1000000000000000.1000000000000000", digest=DIGEST),
        resumed_from=pb.CheckpointRef(name="step-1000000000000000.e1000000000000000.1000000000000000", digest=DIGEST),
        shape=pb.Shape(world_size=2**31, strategy="x" * 256),
        metric=1.0,
    )
    del message.inventory[:]
    message.inventory.extend([longest] * MOST_CHECKPOINTS)
    assert 2 * message.ByteSize() < MESSAGE_BYTES


def test_runs_and_directories_that_cannot_be_are_left_out() -> None:
    """Their names become numbers and paths."""
    message = register(finished_runs=["run-0001", "run-x", "run-\u0663", "../run-0002", "run-0003"])
    assert len(admit(message)) == 3
    assert list(message.finished_runs) == ["run-0001", "run-0003"]
    join = pb.JoinRequest(
        caller=caller(),
        unusable=[
            pb.UnusableCheckpoint(name="step-1.e1.0", reason=ESCAPES),
            pb.UnusableCheckpoint(name="../x", reason="no"),
        ],
    )
    assert len(admit(join)) == 1
    assert [entry.reason for entry in join.unusable] == ["a\\x1b[2Jb c\\u202ed"]


def test_free_text_is_cleaned_and_cut() -> None:
    """A reason is for people: it is never refused."""
    message = pb.FailureRequest(caller=caller(), message="boom \x1b[31m" + "x" * 9000)
    admit(message)
    assert message.message.startswith("boom \\x1b[31mxxx")
    assert len(message.message) == 1000


@given(st.text(), st.integers(min_value=10, max_value=200))
def test_one_line_is_one_printable_line(text: str, longest: int) -> None:
    """Whatever it was, and what was such a line before is unchanged."""
    line = one_line(text, longest)
    assert line.isprintable()
    assert len(line) <= longest
    if text.isprintable() and len(text) <= longest:
        assert line == text


@given(st.sampled_from(REQUESTS), st.binary(max_size=400))
def test_whatever_parses_is_admitted_or_refused(kind: type[Message], data: bytes) -> None:
    """No other exception, and what passes once passes again unchanged."""
    message = kind()
    try:
        message.ParseFromString(data)
        admit(message)
    except ValueError:
        return
    except Exception as error:
        if type(error).__name__ != "DecodeError":
            raise
        return
    before = message.SerializeToString(deterministic=True)
    assert admit(message) == []
    assert message.SerializeToString(deterministic=True) == before
