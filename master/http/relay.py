"""The HTTP edge of a Commander: its runs, their leases for workers that are not ours, their milestones and events."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from dalsegno.protos import control_pb2 as pb
from dalsegno.protos.addresses import address_of
from dalsegno.protos.commander_api import (
    ACQUIRE_PATH,
    EXPIRE,
    MILESTONES,
    RELEASE,
    RENEW_PATH,
    REPORT_PATH,
    RUNS_PATH,
    RunState,
    run_path,
)
from dalsegno.protos.text import name_problem, one_line

from ..brain.door import MOST_WORKERS
from ..server.auth import TlsFiles
from ..server.listener import Listener
from .api import Api
from .guard import Guard
from .lease import Answer, LeaseRefused, Lessor, RelayedRun, Report
from .leases import Token
from .looking import Looking
from .metrics import CONTENT_TYPE, metrics
from .port import Port, application

__all__ = ("RelayEdge",)

# Seconds between two looks at connections that are open for too long.
SWEEP_INTERVAL_SECONDS = 1.0
# The largest number that JSON carries without loss, and the most characters of a text.
MOST_JSON = 2**53
LONGEST_TEXT = 4096


def _name(text: str) -> str:
    if problem := name_problem(text):
        raise ValueError(problem)
    return text


Name = Annotated[str, Field(min_length=1), AfterValidator(_name)]
Text = Annotated[str, Field(max_length=LONGEST_TEXT), AfterValidator(one_line)]
Number = Annotated[int, Field(ge=0, le=MOST_JSON)]
Seconds = Annotated[float, Field(allow_inf_nan=False)]


class _Body(BaseModel):
    """What is sent: a key that it does not know is refused."""

    model_config = ConfigDict(extra="forbid")


class Devices(_Body):
    """What a worker has to train on."""

    gpu: Text = ""
    count: Annotated[int, Field(ge=0, le=MOST_WORKERS)] = 1


class Acquire(_Body):
    """A worker wants the lease."""

    worker_id: Name
    run_id: Name
    cap: Devices = Devices()
    force: bool = False


class Renew(_Body):
    """A worker keeps it."""

    lease_token: str
    worker_id: Name


class Published(_Body):
    """Where a worker's last milestone is."""

    last_synced: Seconds | Text | None = None
    repo: Text | None = None
    revision: Text | None = None


class Said(_Body):
    """How a worker's work goes on."""

    lease_token: str
    run_id: Name
    step: Number = 0
    latest_ckpt: Text | None = None
    hf: Published | None = None
    status: RunState = RunState.RUNNING
    msg: Text | None = None


class Made(_Body):
    """A milestone of a committed checkpoint."""

    repo: Annotated[str, Field(min_length=1, max_length=256)]
    revision: Annotated[str, Field(min_length=1, max_length=256)]
    step: Number
    checkpoint: Name
    digest: Annotated[str, Field(min_length=1, max_length=256)]


_KEYS = sorted({name for body in (Acquire, Devices, Renew, Said, Published, Made) for name in body.model_fields})


class RelayEdge:
    """Serves from `start` to `close`."""

    def __init__(
        self,
        runs: Mapping[str, RelayedRun],
        host: str,
        port: int,
        token: str | None,
        admin: str | None,
        *,
        loopback: bool,
        tls: TlsFiles | None = None,
    ) -> None:
        """Listens at once (port 0: any free one). `token` is for all requests, `admin` for those that overrule others.

        Raises OSError if the address is not available.
        """
        self._lessors = {run_id: Lessor(run) for run_id, run in runs.items()}
        self._looks = {run_id: Looking(run.master) for run_id, run in runs.items()}
        self._guard = Guard(token, admin)
        app = application("The Commander of relayed runs", loopback, "/api/openapi.json", address_of(host, port))
        app.add_exception_handler(RequestValidationError, _wrong)
        app.add_exception_handler(LeaseRefused, _refused)
        self._add_routes(app)
        for run_id, run in runs.items():
            app.include_router(Api(run.master, self._guard, self._looks[run_id], run_path(run_id)).router)
        listener = Listener.open(host, port)
        self._port = Port(app, listener, tls)
        self.address = listener.address

    def start(self) -> None:
        """Starts to answer. An edge that fails says so in the log; the runs of ours do not depend on it."""
        self._port.start(self._sweep())

    async def close(self) -> None:
        """Ends within a bounded time: open connections are cut."""
        await self._port.close()

    def _add_routes(self, app: FastAPI) -> None:
        guard = self._guard
        reads, orders, rules = ([Depends(allowed)] for allowed in (guard.reads, guard.orders, guard.rules))
        router = APIRouter()
        add = router.add_api_route
        add("/healthz", _health, summary="200 while the process works")
        add("/readyz", self._ready, summary="200 where all runs are served")
        one = run_path("{run_id}")
        add(RUNS_PATH, self._all, dependencies=reads, summary="The runs")
        add(one, self._run, dependencies=reads, summary="A run as it stands")
        add(f"{one}/metrics", self._metrics, dependencies=reads, summary="Prometheus' text format")
        for path, act, whose, text in (
            (one + MILESTONES, self._milestone, orders, "A committed checkpoint was published"),
            (one + EXPIRE, self._expire, rules, "Ends the lease of a holder that is known dead"),
            (one + RELEASE, self._release, rules, "Fences whoever holds the run"),
            (ACQUIRE_PATH, self._acquire, orders, "A worker takes a run, if nobody holds it"),
            (RENEW_PATH, self._renew, orders, "A worker keeps it"),
            (REPORT_PATH, self._report, orders, "How a worker's work goes on"),
        ):
            add(path, act, methods=["POST"], dependencies=whose, summary=text)
        app.include_router(router)

    def _lessor(self, run_id: str) -> Lessor:
        """Raises HTTPException (404)."""
        if run_id not in self._lessors:
            known = ", ".join(sorted(self._lessors)[:10])
            raise HTTPException(404, f"no run is called {one_line(run_id, 128)!r} here: there is {known}")
        return self._lessors[run_id]

    def _with_token(self, text: str) -> tuple[Lessor, Token]:
        try:
            token = Token.parse(text)
        except ValueError as error:
            raise HTTPException(400, str(error)) from error
        return self._lessor(token.run_id), token

    async def _ready(self) -> PlainTextResponse:
        for look in self._looks.values():
            await look.now()
        return PlainTextResponse("ok\n")

    async def _all(self) -> dict[str, list[str]]:
        return {"runs": sorted(self._lessors)}

    async def _run(self, run_id: str) -> dict[str, Any]:
        return await self._lessor(run_id).shown()

    async def _metrics(self, run_id: str) -> PlainTextResponse:
        self._lessor(run_id)
        return PlainTextResponse(metrics(await self._looks[run_id].now()), media_type=CONTENT_TYPE)

    async def _milestone(self, run_id: str, made: Made) -> JSONResponse:
        said = pb.Milestone(repo=made.repo, revision=made.revision, step=made.step)
        said.checkpoint.name, said.checkpoint.digest = made.checkpoint, made.digest
        return _answer(await self._lessor(run_id).milestone(said))

    async def _release(self, run_id: str) -> JSONResponse:
        return _answer(await self._lessor(run_id).release())

    async def _expire(self, run_id: str) -> JSONResponse:
        return _answer(await self._lessor(run_id).expire())

    async def _acquire(self, wanted: Acquire, request: Request) -> JSONResponse:
        if wanted.force:
            await self._guard.rules(request)
        lessor = self._lessor(wanted.run_id)
        return _answer(await lessor.acquire(wanted.worker_id, max(1, wanted.cap.count), force=wanted.force))

    async def _renew(self, wanted: Renew) -> JSONResponse:
        lessor, token = self._with_token(wanted.lease_token)
        return _answer(await lessor.renew(token, wanted.worker_id))

    async def _report(self, said: Said) -> JSONResponse:
        lessor, token = self._with_token(said.lease_token)
        if token.run_id != said.run_id:
            raise HTTPException(400, f"this is a lease of {token.run_id!r}, not of {said.run_id!r}")
        if said.status is RunState.WAITING:
            raise HTTPException(422, "status: a worker is RUNNING, or ends as PREEMPTED, FAILED or COMPLETED")
        hub = said.hf or Published()
        plain = said.model_dump(mode="json", exclude={"lease_token", "run_id"})
        report = Report(said.status, said.step, hub.repo or "", hub.revision or "", said.msg or "", plain)
        return _answer(await lessor.take_report(token, report))

    async def _sweep(self) -> None:
        while True:
            with contextlib.suppress(HTTPException):
                for look in self._looks.values():
                    await look.now()
            self._port.drop_old()
            await asyncio.sleep(SWEEP_INTERVAL_SECONDS)


async def _health() -> PlainTextResponse:
    return PlainTextResponse("ok\n")


def _answer(answer: Answer) -> JSONResponse:
    return JSONResponse(answer.body, answer.code)


async def _refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, LeaseRefused)
    return _answer(error.answer)


async def _wrong(request: Request, error: Exception) -> JSONResponse:
    """One line about the first thing that is wrong with a request."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    *_, name = (str(part) for part in first["loc"])
    place = one_line(".".join(str(part) for part in first["loc"] if part != "body"), 200)
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name[:100], _KEYS, 1)
        line = f"{place}: there is no such key" + (f", did you mean {near[0]}?" if near else "")
    elif first["type"] == "json_invalid":
        line = "the body is no JSON"
    elif not place and "json" not in request.headers.get("content-type", ""):
        line = "the body: send JSON, and `content-type: application/json` with it"
    else:
        line = f"{place or 'the body'}: {one_line(first['msg'].removeprefix('Value error, '), 300)}"
    return JSONResponse({"detail": line}, 422)
