"""`run.yaml`: one run that pre-emptible machines carry on one after another, as the Commander and each pod read it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from .yaml_text import Refused, documents

__all__ = ("Baseline", "Hub", "Improvement", "RunFile", "read_run_file")

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_SIGNAL = re.compile(r"SIG(USR1|USR2|TERM|INT|HUP|RTMIN(\+[0-9]+)?)")
# The largest payload of a wait or a rate: a year in seconds, and bytes that an int64 holds.
_YEAR_SECONDS = 366 * 86400
SAVE_DIR = "${save_dir}"


def _absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError(f"{str(path)!r} is no absolute path")
    return path


Seconds = Annotated[float, Field(gt=0, le=_YEAR_SECONDS, allow_inf_nan=False)]
Absolute = Annotated[Path, AfterValidator(_absolute)]


class _Part(BaseModel):
    """A part of the file: a key that it does not know is refused, and nothing changes once it was read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Improvement(_Part):
    """A milestone whenever a metric of the trainer's improves.

    Attributes:
        metric: its name in `metrics_file`.
        mode: which way is better.
        min_delta: the least that counts.
        metrics_file: JSON lines with the metric and, as `step`, the step; below `${save_dir}` unless it is absolute.
    """

    metric: str = Field(min_length=1, max_length=256)
    mode: Literal["min", "max"] = "min"
    min_delta: float = Field(0.0, ge=0, allow_inf_nan=False)
    metrics_file: Path = Path("metrics.jsonl")


class Hub(_Part):
    """Milestones on the Hugging Face Hub.

    Attributes:
        repo: `owner/name` of a model repository; it is made if it is not there.
        interval_seconds: between two milestones; None: by improvement and report only.
        on_improve: when else; None: only by time.
        upload_limit: bytes per second; None: no limit.
        private: a repository that is made is private.
    """

    repo: str
    interval_seconds: Seconds | None = 14400.0
    on_improve: Improvement | None = None
    upload_limit: int | None = Field(None, ge=1024, le=2**62)
    private: bool = True

    @field_validator("repo")
    @classmethod
    def _owner_and_name(cls, repo: str) -> str:
        if not _REPO.fullmatch(repo):
            raise ValueError(f"{repo!r} is no OWNER/NAME")
        return repo


class Baseline(_Part):
    """What a run starts from that has neither a checkpoint nor a milestone: one of both, or nothing.

    Attributes:
        hf: `owner/name@revision`.
        command: makes it in the directory that `${save_dir}` names.
    """

    hf: str | None = None
    command: tuple[str, ...] | None = Field(None, min_length=1)

    @model_validator(mode="after")
    def _one(self) -> Baseline:
        if (self.hf is None) == (self.command is None):
            raise ValueError("it is either hf: OWNER/NAME@REVISION, or command: [...]")
        if self.hf is not None and not (
            _REPO.fullmatch(self.hf.partition("@")[0]) and re.fullmatch(r"[^@\s]+@[A-Za-z0-9._/-]+", self.hf)
        ):
            raise ValueError(f"{self.hf!r} is no OWNER/NAME@REVISION")
        if self.command is not None and not any(SAVE_DIR in word for word in self.command):
            raise ValueError(f"no word of the command has {SAVE_DIR}, where what it makes is looked for")
        return self


class RunFile(_Part):
    """All of `run.yaml`.

    Attributes:
        run_id: names the run on the Commander and on the volume.
        commander: URL of the Commander's HTTP edge.
        l1_root: where the volume is mounted in a pod.
        command: the trainer; `${save_dir}` in it, and `${resume_dir}` where it needs that.
        resume_flag: flag that the trainer gets with the resume point's directory where there is one; None: none.
        checkpoint_glob: what a checkpoint is called below `${save_dir}`; None: as known layouts have it.
        interval_seconds: how often the trainer is to save, as foreign workers are told.
        keep_last: checkpoints that are kept, besides the best and what is being uploaded.
        save_signal: asks the trainer to save before an announced end; None: it is not asked.
        lease_seconds: how long a holder that is not heard keeps the lease. It renews three times as often.
        self_fence: a pod that has not heard the Commander for a lease stops its trainer after a save. False only where
            the volume can be mounted once.
        hf: milestones; None: none.
        baseline: what a run without any checkpoint starts from; None: nothing.
        manifest: what stands in each milestone's `run_manifest.json` besides.
    """

    run_id: str
    commander: str
    l1_root: Absolute
    command: tuple[str, ...] = Field(min_length=1)
    resume_flag: str | None = None
    checkpoint_glob: str | None = None
    interval_seconds: Seconds = 600.0
    keep_last: int = Field(3, ge=1, le=10_000)
    save_signal: str | None = None
    lease_seconds: float = Field(180.0, ge=3, le=86400, allow_inf_nan=False)
    self_fence: bool = True
    hf: Hub | None = None
    baseline: Baseline | None = None
    manifest: dict[str, Any] = Field(default_factory=dict)

    @field_validator("run_id")
    @classmethod
    def _a_name(cls, run_id: str) -> str:
        if not _RUN_ID.fullmatch(run_id):
            raise ValueError(f"{run_id!r} is no name for a directory: letters, digits, '.', '_', '-', at most 128")
        return run_id

    @field_validator("commander")
    @classmethod
    def _a_url(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no URL like https://HOST:8443")
        if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username:
            raise ValueError(f"{url!r}: only the scheme, the host and the port belong here")
        return f"{parts.scheme}://{parts.netloc}"

    @field_validator("command")
    @classmethod
    def _saves_there(cls, command: tuple[str, ...]) -> tuple[str, ...]:
        if not any(SAVE_DIR in word for word in command):
            raise ValueError(f"no word of it has {SAVE_DIR}: what the trainer saves elsewhere goes with the pod")
        return command

    @field_validator("save_signal")
    @classmethod
    def _a_signal(cls, name: str | None) -> str | None:
        if name is not None and not _SIGNAL.fullmatch(name):
            raise ValueError(f"{name!r} is no signal like SIGUSR1")
        return name


def read_run_file(path: Path) -> RunFile:
    """Reads and checks it.

    Raises:
        Refused: one line for each thing that a person must change.
    """
    try:
        found = documents(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise Refused(f"{path} cannot be read: {reason}") from error
    if len(found) != 1 or not isinstance(found[0], dict):
        raise Refused(f"{path}: one mapping belongs there, like `run_id: my-run`, and nothing else")
    try:
        return RunFile.model_validate(found[0])
    except ValidationError as error:
        raise Refused(*(f"{path}: {line}" for line in _lines(error))) from error


def _lines(error: ValidationError) -> Iterator[str]:
    for one in error.errors(include_url=False):
        *above, name = (str(part) for part in one["loc"]) if one["loc"] else ("",)
        place = ".".join([*above, name])
        if one["type"] == "extra_forbidden":
            near = difflib.get_close_matches(name, _keys(above), 1)
            yield f"{place}: there is no such key" + (f", did you mean {near[0]}?" if near else "")
        elif one["type"] == "missing":
            yield f"{place}: missing"
        else:
            yield f"{place}: {one['msg'].removeprefix('Value error, ')}"


def _keys(above: list[str]) -> list[str]:
    """The keys that are known at a place of the file."""
    parts: dict[str, type[BaseModel]] = {"": RunFile, "hf": Hub, "hf.on_improve": Improvement, "baseline": Baseline}
    part = parts.get(".".join(above))
    return [] if part is None else list(part.model_fields)
