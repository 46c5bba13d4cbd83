"""The manifest that seals a checkpoint: what it is, and every file in it with size and checksum.

Canonical JSON (sorted keys, no spaces, UTF-8, one newline at the end), and behind all other keys its own ``checksum``.
The SHA-256 of those bytes is the checkpoint's *digest*, the only thing about it that the master must remember.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from dalsegno.protos import control_pb2
from dalsegno.protos.reads import Reads
from dalsegno.protos.text import LONGEST_NAME

from .best import Best
from .errors import CheckpointDamaged, Damage
from .layout import FORMS, MANIFEST, SHARDED, UNIVERSAL, WEIGHTS, CheckpointName
from .reading import NotRegular, read_regular
from .saved_as import SavedAs, parse_saved_as

VERSION = 2
# Version 1 had no checksum of its own.
READABLE = (1, VERSION)
# A manifest of a 10,000-file checkpoint has about 1.5 MB; anything far beyond is not a manifest.
MAX_BYTES = 64 << 20
# The largest signed and unsigned numbers that messages carry.
MAX_COUNT, MAX_SMALL = (1 << 63) - 1, (1 << 32) - 1

# Each rank of a DeepSpeed engine writes one of these; a universal form is made of nothing else.
_CONVERTED = "_optim_states.pt"
_PROTO_FORMS = {
    SHARDED: control_pb2.FORM_SHARDED,
    UNIVERSAL: control_pb2.FORM_UNIVERSAL,
    WEIGHTS: control_pb2.FORM_WEIGHTS,
}
_T = TypeVar("_T")
# What stands between the other keys and the checksum, and what stands after the checksum.
_SUM_BEGINS, _SUM_ENDS = b',"checksum":"', b'"}\n'


@dataclass(frozen=True)
class Shape:
    """The world that wrote a checkpoint.

    Attributes:
        world_size: Number of ranks.
        strategy: ``"ddp"``, ``"deepspeed-zero-0"`` … ``"deepspeed-zero-3"``, or a name of the script's own.
        any_world_size: Loads at any world size as it is.
        reshards: Loads at any world size without a conversion, because each rank takes its ranges of what others saved.
            Left out of the manifest if false.
        by_place: In a world of the same ranks on each node, each rank loads what the node in its node's place wrote,
            and what the first node wrote. Left out of the manifest if false: a rank may load everything.
        reads: What the ranks of a world of another size load; None: they may load everything. Left out if None.
    """

    world_size: int
    strategy: str
    any_world_size: bool
    reshards: bool = False
    by_place: bool = False
    reads: Reads | None = None

    def loads_at(self, world_size: int) -> bool:
        """Whether a world of this size can load it without a conversion."""
        return self.any_world_size or self.reshards or self.world_size == world_size


@dataclass(frozen=True)
class Position:
    """Where in the data a run stands.

    Attributes:
        data_epoch: Passes over the data set that are complete.
        samples: Global count consumed in the present pass.
    """

    data_epoch: int = 0
    samples: int = 0


@dataclass(frozen=True)
class Order:
    """What fixes the order of samples, beside the position. A run that resumes must agree with it.

    Attributes:
        seed, global_batch_size, shuffle: The sampler's.
        length: Samples in the data set; 0: not known.
        version: How the order is computed (see ``permutation``). A run keeps the version that it began with. Left out
            of the manifest if it is 1.
    """

    seed: int
    length: int
    global_batch_size: int
    shuffle: bool
    version: int = 1


@dataclass(frozen=True)
class Cut:
    """How batches become gradients, which shapes the loss curve besides the order. A run that resumes must agree.

    Attributes:
        tokens: The loss is a mean over tokens; False: over samples.
        drop_last: Short last batches are left out; False if there are none.
        micro_batch_size: Size of the largest fixed micro-batch, the same at every world size; None: not fixed.
        pad, seed: For fixed micro-batches: whether short ones are filled up with rows, and the seed of what is random
            in them (None: not set).
        samples: Names of a few samples, each with a short text that describes its content, by which the same data are
            recognised. Left out of the manifest if there are none.
    """

    tokens: bool
    drop_last: bool
    micro_batch_size: int | None = None
    pad: bool = False
    seed: int | None = None
    samples: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Ref:
    """Names one sealed checkpoint for good: directory name and digest."""

    name: str
    digest: str

    def to_proto(self) -> control_pb2.CheckpointRef:
        return control_pb2.CheckpointRef(name=self.name, digest=self.digest)


@dataclass(frozen=True)
class FileEntry:
    """One file: path relative to the checkpoint with forward slashes, size in bytes, xxh3-128 in lower-case hex."""

    path: str
    size: int
    xxh3_128: str


@dataclass(frozen=True)
class Manifest:
    """What one sealed directory holds. See ``docs/contracts.md`` for the keys."""

    name: str
    job_id: str
    run_id: str
    step: int
    epoch: int
    generation: int
    form: str
    shape: Shape
    position: Position
    order: Order | None
    source: Ref | None
    resumed_from: Ref | None
    min_nodes: int
    max_nodes: int
    metric: float | None
    files: tuple[FileEntry, ...]
    # Left out if no metric is tracked.
    best: Best | None = None
    # A better one that was on its way to the disk as of this one; left out if there was none.
    candidate: Best | None = None
    # How many of the run's checkpoints are kept, if the script says so; left out if it does not.
    keep: int | None = None
    # Left out if no batch plan cuts the data, and in manifests of earlier versions.
    cut: Cut | None = None
    # Left out unless a script without a session saved it.
    saved_as: SavedAs | None = None
    version: int = VERSION

    def __post_init__(self) -> None:
        if self.version not in READABLE:
            raise ValueError(f"manifest version {self.version}, this program reads {READABLE[0]} to {VERSION}")
        parsed = CheckpointName.parse(self.name)
        if (parsed.step, parsed.epoch, parsed.form) != (self.step, self.epoch, self.form):
            raise ValueError(f"name {self.name} disagrees with step {self.step}, epoch {self.epoch}, form {self.form}")
        if (self.source is None) != (self.form == SHARDED):
            raise ValueError(f"a later form names its source and a sharded checkpoint has none ({self.form})")
        if self.metric is not None and not math.isfinite(self.metric):
            raise ValueError(f"metric must be finite, not {self.metric}")
        if self.total_bytes > MAX_COUNT:
            raise ValueError(f"files of {self.total_bytes} bytes together")
        metrics = [best.metric for best in (self.best, self.candidate) if best is not None]
        for text in (self.job_id, self.run_id, self.shape.strategy, *metrics):
            if len(text) > LONGEST_NAME or not text.isprintable():
                raise ValueError(
                    f"up to {LONGEST_NAME} printable characters were expected, not {text[:LONGEST_NAME]!r}"
                )
        paths = [entry.path for entry in self.files]
        if paths != sorted(set(paths)):
            raise ValueError("files must be sorted by path and unique")
        for path in (*paths, *(() if self.saved_as is None else self.saved_as.paths())):
            _check_path(path)

    def to_bytes(self) -> bytes:
        """The canonical bytes, as they stand in ``MANIFEST.json``."""
        content = asdict(replace(self, files=()))
        # A universal checkpoint has thousands, and `asdict` takes its time for each.
        content["files"] = [{"path": one.path, "size": one.size, "xxh3_128": one.xxh3_128} for one in self.files]
        for key in ("best", "candidate", "keep"):
            if getattr(self, key) is None:
                del content[key]
        if self.cut is None:
            del content["cut"]
        elif not self.cut.samples:
            del content["cut"]["samples"]
        if self.saved_as is None:
            del content["saved_as"]
        for key in ("reshards", "by_place", "reads"):
            if content["shape"][key] in (False, None):
                del content["shape"][key]
        if self.order is not None and self.order.version == 1:
            del content["order"]["version"]
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
        if self.version == 1:
            return text + b"\n"
        summed = text[:-1]
        return summed + _SUM_BEGINS + xxhash.xxh3_128_hexdigest(summed).encode() + _SUM_ENDS

    @cached_property
    def digest(self) -> str:
        """SHA-256 of ``to_bytes()``, hex."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @property
    def ref(self) -> Ref:
        return Ref(self.name, self.digest)

    @property
    def total_bytes(self) -> int:
        """Size of all files together."""
        return sum(entry.size for entry in self.files)

    @property
    def largest_file(self) -> int:
        """Size of the largest file."""
        return max((entry.size for entry in self.files), default=0)

    @property
    def parsed_name(self) -> CheckpointName:
        return CheckpointName.parse(self.name)

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Parses canonical bytes.

        Raises:
            ValueError: It is not a canonical manifest of a version that we know.
        """
        _check_sum(data)
        try:
            raw = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not JSON: {str(error)[:LONGEST_NAME]}") from error
        if isinstance(raw, dict):
            raw.pop("checksum", None)
        manifest = _parse(raw)
        # A manifest has exactly one spelling, so a torn or edited file cannot pass as a sealed one.
        if manifest.to_bytes() != data:
            raise ValueError("not in canonical form")
        vars(manifest)["digest"] = hashlib.sha256(data).hexdigest()
        return manifest

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Reads the manifest of ``directory``.

        Raises:
            CheckpointDamaged: It is missing, torn, no file, or belongs to another directory.
            OSError: The file system failed, which says nothing about the checkpoint.
        """
        try:
            manifest = cls.from_bytes(read_regular(Path(directory) / MANIFEST, MAX_BYTES))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointDamaged(Path(directory), MANIFEST, Damage.MANIFEST, "not there") from error
        except NotRegular as error:
            raise CheckpointDamaged(Path(directory), MANIFEST, Damage.MANIFEST, str(error.strerror)) from error
        except ValueError as error:
            raise CheckpointDamaged(Path(directory), MANIFEST, Damage.MANIFEST, str(error)) from error
        if manifest.name != Path(directory).name:
            raise CheckpointDamaged(Path(directory), MANIFEST, Damage.MANIFEST, f"it belongs to {manifest.name}")
        return manifest

    def to_proto(self) -> control_pb2.Checkpoint:
        """The same as a message, which has the files' total size and the largest file's size in place of their list."""
        return control_pb2.Checkpoint(
            ref=self.ref.to_proto(),
            run_id=self.run_id,
            step=self.step,
            epoch=self.epoch,
            form=_PROTO_FORMS[self.form],
            shape=control_pb2.Shape(**asdict(self.shape)),
            position=control_pb2.Position(**asdict(self.position)),
            source=None if self.source is None else self.source.to_proto(),
            resumed_from=None if self.resumed_from is None else self.resumed_from.to_proto(),
            bytes=self.total_bytes,
            min_nodes=self.min_nodes,
            max_nodes=self.max_nodes,
            generation=self.generation,
            metric=self.metric,
            best="" if self.best is None else self.best.name,
            candidate="" if self.candidate is None else self.candidate.name,
            largest_file=self.largest_file,
            keep=self.keep,
            no_universal_form=self.form == SHARDED and not any(entry.path.endswith(_CONVERTED) for entry in self.files),
        )


def _check_sum(data: bytes) -> None:
    """Checks the checksum before anything is parsed, so that nothing of a changed manifest is. Version 1 has none."""
    summed, found, rest = data.rpartition(_SUM_BEGINS)
    if found and rest != xxhash.xxh3_128_hexdigest(summed).encode() + _SUM_ENDS:
        raise ValueError("its checksum is not that of its content")


def _check_path(path: str) -> None:
    if not {"", ".", ".."}.isdisjoint(path.split("/")) or path == MANIFEST or "\0" in path:
        raise ValueError(f"not a path inside a checkpoint: {path!r}")
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the name of a file is not UTF-8: {path!r}") from error


def _parse(raw: object) -> Manifest:
    left_out = {"best": None, "candidate": None, "keep": None, "cut": None, "saved_as": None}
    top = _object({**left_out, **raw} if isinstance(raw, dict) else raw, "manifest", Manifest)
    if top["form"] not in FORMS:
        raise ValueError(f"unknown form {top['form']!r}")
    files = top["files"]
    if not isinstance(files, list):
        raise ValueError("files is not a list")
    return Manifest(
        name=_text(top["name"], "name"),
        job_id=_text(top["job_id"], "job_id"),
        run_id=_text(top["run_id"], "run_id"),
        step=_count(top["step"], "step"),
        epoch=_count(top["epoch"], "epoch"),
        generation=_count(top["generation"], "generation"),
        form=_text(top["form"], "form"),
        shape=_shape(top["shape"]),
        position=_position(top["position"]),
        order=_maybe(top["order"], _order),
        source=_maybe(top["source"], _ref),
        resumed_from=_maybe(top["resumed_from"], _ref),
        min_nodes=_count(top["min_nodes"], "min_nodes", MAX_SMALL),
        max_nodes=_count(top["max_nodes"], "max_nodes", MAX_SMALL),
        metric=_maybe(top["metric"], _number),
        best=_maybe(top["best"], _best),
        candidate=_maybe(top["candidate"], _best),
        keep=_maybe(top["keep"], _keep),
        cut=_maybe(top["cut"], _cut),
        saved_as=_maybe(top["saved_as"], lambda raw: parse_saved_as(raw, MAX_COUNT)),
        files=tuple(_file(entry) for entry in files),
        version=_count(top["version"], "version"),
    )


def _shape(raw: object) -> Shape:
    left_out = {"reshards": False, "by_place": False, "reads": None}
    keys = _object({**left_out, **raw} if isinstance(raw, dict) else raw, "shape", Shape)
    return Shape(
        _count(keys["world_size"], "world_size", MAX_SMALL),
        _text(keys["strategy"], "strategy"),
        _flag(keys["any_world_size"]),
        _flag(keys["reshards"]),
        _flag(keys["by_place"]),
        _maybe(keys["reads"], _reads),
    )


def _reads(raw: object) -> Reads:
    keys = _object(raw, "reads", Reads)
    if not isinstance(keys["lengths"], list):
        raise ValueError("lengths is not a list")
    lengths = tuple(_count(length, "length") for length in keys["lengths"])
    return Reads(lengths, _count(keys["alignment"], "alignment", MAX_SMALL))


def _position(raw: object) -> Position:
    keys = _object(raw, "position", Position)
    return Position(_count(keys["data_epoch"], "data_epoch"), _count(keys["samples"], "samples"))


def _order(raw: object) -> Order:
    keys = _object({"version": 1, **raw} if isinstance(raw, dict) else raw, "order", Order)
    return Order(
        _seed(keys["seed"]),
        _count(keys["length"], "length"),
        _count(keys["global_batch_size"], "global_batch_size"),
        _flag(keys["shuffle"]),
        _count(keys["version"], "version of the order"),
    )


def _cut(raw: object) -> Cut:
    keys = _object({"samples": [], **raw} if isinstance(raw, dict) else raw, "cut", Cut)
    size = _maybe(keys["micro_batch_size"], lambda size: _count(size, "micro_batch_size"))
    return Cut(
        _flag(keys["tokens"]),
        _flag(keys["drop_last"]),
        size,
        _flag(keys["pad"]),
        _maybe(keys["seed"], _seed),
        _samples(keys["samples"]),
    )


def _samples(raw: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(raw, list) or not all(isinstance(one, list) and len(one) == 2 for one in raw):
        raise ValueError("samples is not a list of pairs")
    return tuple((_text(name, "name of a sample"), _text(text, "print of a sample")) for name, text in raw)


def _best(raw: object) -> Best:
    keys = _object(raw, "best", Best)
    CheckpointName.parse(_text(keys["name"], "name"))
    return Best(keys["name"], _text(keys["metric"], "metric"), _text(keys["mode"], "mode"), _number(keys["value"]))


def _ref(raw: object) -> Ref:
    keys = _object(raw, "reference", Ref)
    CheckpointName.parse(_text(keys["name"], "name"))
    return Ref(keys["name"], _hex(keys["digest"], 64))


def _file(raw: object) -> FileEntry:
    keys = _object(raw, "file", FileEntry)
    return FileEntry(_text(keys["path"], "path"), _count(keys["size"], "size"), _hex(keys["xxh3_128"], 32))


def _object(raw: object, what: str, cls: type[Any]) -> Mapping[str, Any]:
    if not isinstance(raw, dict):
        raise ValueError(f"{what} is not an object")
    wanted = set(cls.__dataclass_fields__)
    if set(raw) != wanted:
        raise ValueError(f"{what} has keys {str(sorted(raw))[:LONGEST_NAME]}, wanted {sorted(wanted)}")
    return raw


def _maybe(raw: object, parse: Callable[[object], _T]) -> _T | None:
    return None if raw is None else parse(raw)


def _text(raw: object, what: str) -> str:
    if not isinstance(raw, str):
        raise ValueError(f"{what} is not a string")
    return raw


def _count(raw: object, what: str, most: int = MAX_COUNT) -> int:
    if type(raw) is not int or not 0 <= raw <= most:
        raise ValueError(f"{what} is not a count")
    return raw


def _seed(raw: object) -> int:
    if type(raw) is not int:
        raise ValueError("seed is not an integer")
    return raw


def _keep(raw: object) -> int:
    return _count(raw, "keep", MAX_SMALL)


def _number(raw: object) -> float:
    # An integer stays one: the manifest's canonical bytes must come out as they went in.
    if isinstance(raw, bool) or not isinstance(raw, (int, float)) or abs(raw) > sys.float_info.max:
        raise ValueError("not a finite number")
    return raw


def _flag(raw: object) -> bool:
    if not isinstance(raw, bool):
        raise ValueError(f"not a truth value: {raw!r}")
    return raw


def _hex(raw: object, digits: int) -> str:
    text = _text(raw, "hex number")
    if len(text) != digits or set(text) - set("0123456789abcdef"):
        raise ValueError(f"not {digits} hex digits: {text[:digits]!r}")
    return text
