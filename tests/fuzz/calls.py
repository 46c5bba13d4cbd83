"""Calls that nobody honest makes, in families: who calls, what they know, and how far they twist it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from google.protobuf import text_format
from google.protobuf.message import DecodeError, Message

from dalsegno.protos import control_pb2 as pb

from .good_agents import PROBE, settings
from .values import BYTES, NUMBERS, TEXTS, disturb, mutate

__all__ = ["FAMILIES", "METHODS", "Call", "Rogue", "Scene", "registration"]

SERVICE: Any = pb.DESCRIPTOR.services_by_name["Control"]
# Whoever has the token may stop the job: that is no attack, and nothing else would be seen behind it.
METHODS: dict[str, type[Message]] = {
    method.name: getattr(pb, method.input_type.name) for method in SERVICE.methods if method.name != "Stop"
}
_SHOWN = 600


@dataclass(frozen=True)
class Call:
    """One call as it goes over the wire. `token`: right, wrong or none. `forged`: it speaks for somebody else."""

    method: str
    data: bytes
    token: str = "right"
    forged: bool = False
    dropped: bool = False

    def __str__(self) -> str:
        """As a person repeats it: the message's text where the bytes are one, else their hex."""
        try:
            message = METHODS[self.method].FromString(self.data)
            said = text_format.MessageToString(message, as_one_line=True)
        except (KeyError, DecodeError):
            said = self.data.hex()
        cut = f"… ({len(said)} characters)" if len(said) > _SHOWN else ""
        return f"{self.method}({said[:_SHOWN]}{cut}) token={self.token}" + (" dropped" if self.dropped else "")


@dataclass
class Rogue:
    """A registered node without a place in the world, and without manners."""

    number: int
    life: int = 0
    requests: int = 0

    @property
    def name(self) -> str:
        return f"rogue-{self.number}"

    @property
    def incarnation(self) -> str:
        return f"{self.number:016x}{self.life:016x}"

    @property
    def secret(self) -> bytes:
        return f"the secret of rogue {self.number:08d}".encode()


@dataclass
class Scene:
    """What a caller may know: those who train, and where they are."""

    good: list[tuple[str, str]]
    rogues: list[Rogue]
    run_id: str
    epoch: int
    generation: int = 1
    commits: list[pb.CheckpointRef] = field(default_factory=list)
    step: int = 0


def registration(rogue: Rogue) -> pb.RegisterRequest:
    """As an honest newcomer would say it; its next life proves that it was the one before."""
    return pb.RegisterRequest(
        job_id="job",
        incarnation=rogue.incarnation,
        protocol=1,
        host=rogue.name,
        node=rogue.name,
        nproc=1,
        settings=settings(),
        probe=PROBE,
        secret=rogue.secret,
    )


def _caller(scene: Scene, rogue: Rogue) -> pb.Caller:
    rogue.requests += 1
    return pb.Caller(
        job_id="job",
        node=rogue.name,
        incarnation=rogue.incarnation,
        epoch=scene.epoch,
        request=rogue.requests,
        protocol=1,
        secret=rogue.secret,
    )


def _checkpoint(rng: random.Random, scene: Scene) -> pb.Checkpoint:
    """One that nobody has sealed, newer than all."""
    step, form = scene.step + rng.choice((1, 5, 1000)), rng.choice((pb.FORM_SHARDED, pb.FORM_UNIVERSAL))
    name = f"step-{step}.e{scene.epoch}.1"
    checkpoint = pb.Checkpoint(
        ref=pb.CheckpointRef(name=name, digest=f"{rng.getrandbits(256):064x}"),
        run_id=scene.run_id,
        step=step,
        epoch=scene.epoch,
        form=form,
        shape=pb.Shape(world_size=2, strategy="ddp", any_world_size=True),
        min_nodes=2,
        max_nodes=2,
        generation=scene.generation,
    )
    if form == pb.FORM_UNIVERSAL and scene.commits:
        checkpoint.source.CopyFrom(rng.choice(scene.commits))
        checkpoint.ref.name = f"{checkpoint.source.name}.universal.1"
    return checkpoint


def _parts(rng: random.Random) -> list[int]:
    return [rng.choice((0, 1, 2, 2**31)) for _ in range(rng.randrange(3))]


def _known(rng: random.Random, scene: Scene) -> pb.CheckpointRef:
    return rng.choice(scene.commits) if scene.commits else pb.CheckpointRef(name="step-1.e1.1", digest="0" * 64)


def _sensible(rng: random.Random, scene: Scene, method: str) -> Any:
    """A message that somebody may send, who lies about nothing but its content; without a caller."""
    match method:
        case "Register":
            return registration(Rogue(rng.randrange(100, 10_000)))
        case "Join":
            request = pb.JoinRequest(
                round=scene.epoch + rng.choice((0, 1, 1, 2)), store_host="127.0.0.1", store_port=1234, probe=PROBE
            )
            request.inventory.append(_checkpoint(rng, scene))
            request.resume.CopyFrom(_known(rng, scene))
            request.unusable.add(name=request.resume.name, reason="it is torn")
            return request
        case "Leave":
            return pb.LeaveRequest(notice=rng.choice((0.1, 30.0)))
        case "ReportProgress":
            return pb.ProgressRequest(step=scene.step + 1, loss=0.1, draining=rng.random() < 0.5, training_ended=True)
        case "ReportDrained":
            return pb.DrainedRequest(checkpoint=_known(rng, scene), step=scene.step + 1)
        case "ReportFinished":
            return pb.FinishedRequest(step=scene.step + 1)
        case "ReportFailure":
            return pb.FailureRequest(kind=pb.FAILURE_KIND_WORKER, exit_code=1, message="it broke", step=scene.step)
        case "CommitCheckpoint":
            return pb.CommitRequest(checkpoint=_checkpoint(rng, scene), lease=rng.choice((0, 1)))
        case "ReportBadCheckpoint":
            return pb.BadCheckpointRequest(ref=_known(rng, scene), form=pb.FORM_SHARDED, file="model.pt", message="bad")
        case "ReportVerification":
            return pb.VerificationReport(number=rng.choice((0, 1, 2)), intact=rng.random() < 0.5, message="bad")
        case "ReportConversion":
            return pb.ConversionReport(lease=rng.choice((0, 1, 2)), state=rng.randrange(5), message="bad")
        case "ReportSighted":
            return pb.SightedRequest(ref=_known(rng, scene))
        case "ReportPruned":
            return pb.PrunedRequest(refs=scene.commits)
        case "ReportShortage":
            return pb.ShortageRequest(missing_bytes=rng.choice((0, 1, 1 << 40, (1 << 64) - 1)))
        case "ReportHeld":
            known = _checkpoint(rng, scene)
            wanted, unsent, all_said = (rng.random() < share for share in (0.5, 0.2, 0.2))
            return pb.HeldRequest(checkpoint=known, parts=_parts(rng), make_durable=wanted, unsent=unsent, all=all_said)
        case "ReportDurable":
            return pb.DurableRequest(ref=_known(rng, scene), failure=rng.choice(("", "no space")), parts=_parts(rng))
        case "ReportRemark":
            return pb.RemarkRequest(text=rng.choice(("", "it is slow", "x" * 5000)), warning=rng.random() < 0.5)
        case "Scale":
            return pb.ScaleRequest(job_id="job", protocol=1, nodes=rng.choice((0, 2, 3, 2**31)))
        case "DrainNode":
            return pb.DrainNodeRequest(job_id="job", protocol=1, node=rng.choice(("", "nobody", "x" * 400)))
        case "GetEvents":
            return pb.EventsRequest(job_id="job", protocol=1, after=rng.randrange(50), wait_seconds=0.01)
        case "GetStatus":
            return pb.StatusRequest(job_id="job", protocol=1)
    return METHODS[method]()


def _hostile(rng: random.Random, scene: Scene, method: str, caller: pb.Caller | None) -> Message:
    message = _sensible(rng, scene, method)
    if caller is not None and "caller" in message.DESCRIPTOR.fields_by_name:
        message.caller.CopyFrom(caller)
    disturb(rng, message, kept=("caller",))
    if method == "Scale" and 0 < message.nodes < 2:
        # Whoever has the token may scale; that is no attack.
        message.nodes = 2
    return message


def strangers(rng: random.Random, scene: Scene) -> Iterator[Call]:
    """Callers who never registered: without a token, with a wrong one, of another job, of another version."""
    while True:
        method = rng.choice(list(METHODS))
        token = rng.choice(("right", "none", "wrong"))
        caller = pb.Caller(
            job_id=rng.choice(("job", "job", "other", "", *TEXTS)),
            node=rng.choice((scene.good[0][0], "stranger", *TEXTS)),
            incarnation=rng.choice(("", "f" * 32, *TEXTS)),
            epoch=rng.choice((scene.epoch, *NUMBERS)),
            request=rng.choice(NUMBERS),
            protocol=rng.choice((0, 1, 1, 1, 2, 2**32 - 1)),
            secret=rng.choice(BYTES),
        )
        message: Any = _hostile(rng, scene, method, caller)
        if method == "Register":
            message.job_id = rng.choice(("other", "", "job\n"))
        yield Call(method, message.SerializeToString(), token, dropped=rng.random() < 0.1)


def malformed(rng: random.Random, scene: Scene) -> Iterator[Call]:
    """Bytes that were a valid message before an accident."""
    while True:
        method = rng.choice(list(METHODS))
        message = _hostile(rng, scene, method, _caller(scene, rng.choice(scene.rogues)))
        yield Call(method, mutate(rng, message.SerializeToString()))


def registrations(rng: random.Random, scene: Scene) -> Iterator[Call]:
    """Newcomers with numbers, names and lists beyond all measure."""
    while True:
        request = registration(Rogue(rng.randrange(100, 10_000)))
        request.inventory.append(_checkpoint(rng, scene))
        request.generation = rng.choice((0, scene.generation, *NUMBERS))
        request.epoch = rng.choice((0, scene.epoch, *NUMBERS))
        request.known_settings.CopyFrom(settings())
        if rng.random() < 0.3:
            request.node = rng.choice(TEXTS)
        disturb(rng, request, kept=("job_id",))
        yield Call("Register", request.SerializeToString())


def forgers(rng: random.Random, scene: Scene) -> Iterator[Call]:
    """Nodes that speak in the name of one that trains: they know everything of it but its secret."""
    methods = [method for method, kind in METHODS.items() if "caller" in kind.DESCRIPTOR.fields_by_name]
    while True:
        name, incarnation = rng.choice(scene.good)
        secret = rng.choice((b"", rng.choice(scene.rogues).secret, *BYTES))
        if rng.random() < 0.15:
            request = registration(Rogue(rng.randrange(100, 10_000)))
            request.secret = secret
            if rng.random() < 0.5:
                request.previous_incarnation = incarnation
            else:
                request.incarnation, request.node = incarnation, rng.choice((name, "", "other"))
            # Without the secret a previous life proves nothing, but the newcomer may be let in as one.
            yield Call("Register", request.SerializeToString(), forged=request.incarnation == incarnation)
            continue
        caller = pb.Caller(
            job_id="job",
            node=rng.choice((name, name, scene.rogues[0].name)),
            incarnation=incarnation,
            epoch=scene.epoch,
            request=rng.choice((0, 1, 10**6, 2**64 - 1)),
            protocol=1,
            secret=secret,
        )
        method = rng.choice(methods)
        yield Call(method, _hostile(rng, scene, method, caller).SerializeToString(), forged=True)


def rogues(rng: random.Random, scene: Scene) -> Iterator[Call]:
    """Registered nodes outside the world, every call of the protocol in no order, under their own name."""
    while True:
        rogue, method = rng.choice(scene.rogues), rng.choice(list(METHODS))
        if method == "Register" and rng.random() < 0.8:
            request = registration(rogue)
            request.previous_incarnation = rogue.incarnation
            rogue.life += 1
            rogue.requests = 0
            request.incarnation = rogue.incarnation
            yield Call(method, request.SerializeToString())
            continue
        caller = _caller(scene, rogue)
        if rng.random() < 0.2:
            caller.epoch = rng.choice(NUMBERS)
        if rng.random() < 0.05:
            caller.request = rng.choice(NUMBERS)
        if rng.random() < 0.1:
            caller.secret = rng.choice(BYTES)
        message = _hostile(rng, scene, method, caller)
        yield Call(method, message.SerializeToString(), dropped=rng.random() < 0.1)


def everybody(rng: random.Random, scene: Scene) -> Iterator[Call]:
    """All families at once."""
    crowd = [family(rng, scene) for family in FAMILIES.values() if family is not everybody]
    while True:
        yield next(rng.choice(crowd))


FAMILIES: dict[str, Callable[[random.Random, Scene], Iterator[Call]]] = {
    "strangers": strangers,
    "malformed": malformed,
    "registrations": registrations,
    "forgers": forgers,
    "rogues": rogues,
    "everybody": everybody,
}
