"""`run.yaml`: one run that pre-emptible machines carry on one after another, as the Commander and each pod read it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from .options import JOB_ID
from .text import one_line, text_problem
from .yaml_text import InputRefused, documents

__all__ = ("Baseline", "Hub", "Improvement", "RunFile", "commander_url", "read_run_file")

_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_HOST = re.compile(r"[^\s/\\?#@]{1,253}")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
_SIGNAL = re.compile(r"SIG(USR1|USR2|TERM|INT|HUP|RTMIN(\+([0-9]|[12][0-9]|30))?)")
# The largest payload of a wait or a rate: a year in seconds, and bytes that an int64 holds.
_YEAR_SECONDS = 366 * 86400
# The largest file that is read, and characters of a path and of a line about it.
_MOST_BYTES = 256 << 10
_LONGEST_PATH, _LONGEST_LINE = 1024, 400
SAVE_DIR = "${save_dir}"


def _path(path: Path) -> Path:
    if problem := text_problem(str(path), _LONGEST_PATH):
        raise ValueError(f"it {problem}")
    return path


def _absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError(f"{str(path)!r} is no absolute path")
    return path


def _word(text: str) -> str:
    if "\0" in text:
        raise ValueError("a NUL character can be handed to no program")
    return text


def _repository(repo: str) -> str:
    """As the hub has them. Raises ValueError."""
    if not _REPO.fullmatch(repo) or "--" in repo or ".." in repo or repo.endswith((".git", ".", "-")):
        raise ValueError(f"{repo!r} is no OWNER/NAME of the hub")
    return repo


# Strict: `true` is no number, nor is a text in quotes.
Seconds = Annotated[float, Field(gt=0, le=_YEAR_SECONDS, allow_inf_nan=False, strict=True)]
AnyPath = Annotated[Path, AfterValidator(_path)]
Absolute = Annotated[AnyPath, AfterValidator(_absolute)]
Word = Annotated[str, AfterValidator(_word)]
Words = Annotated[tuple[Word, ...], Field(min_length=1)]


# What belongs there, by pydantic's name of what is wrong, where its own words are Python's.
_SAID = {
    "tuple_type": 'it is a list of words, like [python, train.py, --out, "${save_dir}"]',
    "too_short": "it is empty",
    "string_too_short": "it is empty",
    "string_type": "it is text: put it in quotes",
    "path_type": "it is a path",
    "model_type": "keys and values belong there, in lines of their own below it",
    "dict_type": "keys and values belong there, in lines of their own below it",
    "float_type": "it is a number, without quotes",
    "int_type": "it is a whole number, without quotes",
    "bool_parsing": "it is true or false",
    "bool_type": "it is true or false",
}


class _Part(BaseModel):
    """A part of the file: a key that it does not know is refused, and nothing changes once it was read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _file_below(path: Path) -> Path:
    if not path.name or ".." in path.parts:
        raise ValueError(f"{str(path)!r} is no file below {SAVE_DIR}, nor an absolute path without '..'")
    return path


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
    min_delta: float = Field(0.0, ge=0, allow_inf_nan=False, strict=True)
    metrics_file: AnyPath = Path("metrics.jsonl")

    @field_validator("metric")
    @classmethod
    def _a_name(cls, metric: str) -> str:
        if not metric.isprintable():
            raise ValueError(f"{metric!r} has characters that cannot be printed")
        return metric

    @field_validator("metrics_file")
    @classmethod
    def _a_file(cls, path: Path) -> Path:
        return _file_below(path)


class Hub(_Part):
    """Milestones on the Hugging Face Hub.

    Attributes:
        repo: `owner/name` of a model repository; it is made if it is not there.
        interval_seconds: between two milestones; None: by improvement and report only.
        on_improve: when else; None: only by time.
        upload_limit: bytes per second; None: no limit.
        private: a repository that is made is private.
        metrics_file: goes with each milestone, as in `on_improve`; None: the one of `on_improve`, if there is one.
    """

    repo: str
    interval_seconds: Seconds | None = 14400.0
    on_improve: Improvement | None = None
    upload_limit: int | None = Field(None, ge=1024, le=2**62, strict=True)
    private: bool = True
    metrics_file: AnyPath | None = None

    @field_validator("repo")
    @classmethod
    def _owner_and_name(cls, repo: str) -> str:
        return _repository(repo)

    @field_validator("metrics_file")
    @classmethod
    def _a_file(cls, path: Path | None) -> Path | None:
        return None if path is None else _file_below(path)

    @model_validator(mode="after")
    def _one_file(self) -> Hub:
        improve = self.on_improve
        named = improve is not None and "metrics_file" in improve.model_fields_set
        if named and improve is not None and self.metrics_file not in (None, improve.metrics_file):
            raise ValueError("metrics_file and on_improve.metrics_file name two files: say it once")
        return self

    @property
    def metrics(self) -> Path | None:
        """The trainer's metrics file; None: none is named."""
        if self.metrics_file is not None:
            return self.metrics_file
        return None if self.on_improve is None else self.on_improve.metrics_file


class Baseline(_Part):
    """What a run starts from that has neither a checkpoint nor a milestone: one of both, or nothing.

    Attributes:
        hf: `owner/name@revision`.
        command: makes it in the directory that `${save_dir}` names.
    """

    hf: str | None = None
    command: Words | None = None

    @model_validator(mode="after")
    def _one(self) -> Baseline:
        if (self.hf is None) == (self.command is None):
            raise ValueError("it is either hf: OWNER/NAME@REVISION, or command: [...]")
        if self.hf is not None:
            repo, _, revision = self.hf.partition("@")
            if not _REVISION.fullmatch(revision) or ".." in revision:
                raise ValueError(f"{self.hf!r} is no OWNER/NAME@REVISION")
            _repository(repo)
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
        interval_seconds: how often the trainer is to save: foreign workers are told so; people, if ours does not.
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
    command: Words
    resume_flag: Word | None = Field(None, min_length=1)
    checkpoint_glob: str | None = None
    interval_seconds: Seconds = 600.0
    keep_last: int = Field(3, ge=1, le=10_000, strict=True)
    save_signal: str | None = None
    lease_seconds: float = Field(180.0, ge=3, le=86400, allow_inf_nan=False, strict=True)
    self_fence: bool = True
    hf: Hub | None = None
    baseline: Baseline | None = None
    manifest: dict[str, Any] = Field(default_factory=dict)

    @field_validator("run_id")
    @classmethod
    def _a_name(cls, run_id: str) -> str:
        if not JOB_ID.fullmatch(run_id):
            raise ValueError(f"{run_id!r} is no name for a directory: letters, digits, '.', '_', '-', at most 128")
        return run_id

    @field_validator("commander")
    @classmethod
    def _a_url(cls, url: str) -> str:
        return commander_url(url)

    @field_validator("command")
    @classmethod
    def _saves_there(cls, command: tuple[str, ...]) -> tuple[str, ...]:
        if not any(SAVE_DIR in word for word in command):
            raise ValueError(f"no word of it has {SAVE_DIR}: what the trainer saves elsewhere goes with the pod")
        return command

    @field_validator("checkpoint_glob")
    @classmethod
    def _below(cls, glob: str | None) -> str | None:
        if glob is not None and ("\0" in glob or not {"", ".", ".."}.isdisjoint(glob.removesuffix("/").split("/"))):
            raise ValueError(f"{glob!r} is no pattern for what lies below {SAVE_DIR}, like checkpoint-*")
        return glob

    @field_validator("save_signal")
    @classmethod
    def _a_signal(cls, name: str | None) -> str | None:
        if name is not None and not _SIGNAL.fullmatch(name):
            raise ValueError(f"{name!r} is no signal like SIGUSR1")
        return name


def commander_url(url: str) -> str:
    """The URL without a slash at its end.

    Raises:
        ValueError: one line. It repeats nothing that may be a password.
    """
    if "@" in url:
        raise ValueError("no name and no password belong there: the token stands in the environment (DALSEGNO_TOKEN)")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or not _HOST.fullmatch(parts.hostname):
        raise ValueError(f"{one_line(url, 200)!r} is no URL like https://HOST:8443")
    if url.rstrip("/").lower() != f"{parts.scheme}://{parts.netloc}".lower():
        raise ValueError(f"only the scheme, the host and the port belong there: {parts.scheme}://{parts.netloc}")
    try:
        known = parts.port != 0
    except ValueError:
        known = False
    if not known:
        raise ValueError("its port is no number from 1 to 65535")
    return f"{parts.scheme}://{parts.netloc}"


def read_run_file(path: Path) -> RunFile:
    """Reads and checks it.

    Raises:
        InputRefused: one line for each thing that a person must change.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise InputRefused(f"{path} is larger than {_MOST_BYTES >> 10} KiB: this is no file of a run")
        found = documents(content.decode(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise InputRefused(f"{path} cannot be read: {reason}") from error
    if len(found) != 1 or not isinstance(found[0], dict):
        raise InputRefused(f"{path}: one mapping belongs there, like `run_id: my-run`, and nothing else")
    try:
        return RunFile.model_validate(found[0])
    except ValidationError as error:
        raise InputRefused(*(f"{path}: {one_line(line, _LONGEST_LINE)}" for line in _lines(error))) from error


def _lines(error: ValidationError) -> Iterator[str]:
    for one in error.errors(include_url=False):
        # pydantic adds a part of its own where a key is wrong, and not its value.
        *above, name = (str(part) for part in one["loc"] if part != "[key]") if one["loc"] else ("",)
        place = ".".join([*above, name])
        if one["type"] == "extra_forbidden":
            near = difflib.get_close_matches(name, _keys(above), 1)
            yield f"{place}: there is no such key" + (f", did you mean {near[0]}?" if near else "")
        elif one["type"] == "missing":
            yield f"{place}: missing"
        elif "[key]" in one["loc"] or one["type"] == "invalid_key":
            yield f"{place}: a key is text: put it in quotes"
        else:
            yield f"{place}: {_SAID.get(one['type']) or one['msg'].removeprefix('Value error, ')}"


def _keys(above: list[str]) -> list[str]:
    """The keys that are known at a place of the file."""
    parts: dict[str, type[BaseModel]] = {"": RunFile, "hf": Hub, "hf.on_improve": Improvement, "baseline": Baseline}
    part = parts.get(".".join(above))
    return [] if part is None else list(part.model_fields)
