"""What a checkpoint says about itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dalsegno.protos.reads import Reads

from ..checkpoint import SHARDED, Best, Cut, FileEntry, Manifest, Order, Position, Ref, Shape
from ..rank.identity import Identity
from .tiers import Disk


@dataclass(frozen=True)
class Content:
    """What a checkpoint says about itself, apart from its files.

    Attributes:
        step: Optimizer steps done.
        position: Where the data continue.
        order: The order of samples; None if the script has its own.
        strategy: ``"ddp"``, ``"deepspeed-zero-<stage>"``, or a name of the script's own.
        any_world_size: It loads at any world size as it is.
        reshards: It loads at any world size without a conversion, because each rank takes its ranges.
        by_place, reads: See ``Shape``.
        metric: The run's tracked metric.
        best: The best checkpoint as of this one.
        candidate: A better one that is on its way to the disk.
        keep: How many of the run's checkpoints are kept, 0: all; None: the job's setting.
        cut: How its batches become gradients; None if the script has its own way.
        make_durable: It goes to memory, and the agents bring it to the disk. The checkpoint itself does not say so.
    """

    step: int
    position: Position
    order: Order | None = None
    strategy: str = "ddp"
    any_world_size: bool = True
    reshards: bool = False
    by_place: bool = False
    reads: Reads | None = None
    metric: float | None = None
    best: Best | None = None
    candidate: Best | None = None
    keep: int | None = None
    cut: Cut | None = None
    make_durable: bool = False

    def manifest(
        self, name: str, identity: Identity, resumed_from: Ref | None, files: tuple[FileEntry, ...]
    ) -> Manifest:
        """The manifest that seals it. Every rank makes the same bytes."""
        return Manifest(
            name=name,
            job_id=identity.job_id,
            run_id=identity.run_id,
            step=self.step,
            epoch=identity.epoch,
            generation=identity.generation,
            form=SHARDED,
            shape=Shape(
                identity.world_size, self.strategy, self.any_world_size, self.reshards, self.by_place, self.reads
            ),
            position=self.position,
            order=self.order,
            source=None,
            resumed_from=resumed_from,
            min_nodes=identity.min_nodes,
            max_nodes=identity.max_nodes,
            metric=self.metric,
            files=files,
            best=self.best,
            candidate=self.candidate,
            keep=self.keep,
            cut=self.cut,
        )


@dataclass
class Own:
    """A save, and what this rank has done of it, should it have to be completed without a leaver."""

    content: Content
    tier: Disk
    drain: bool = False
    name: str = ""
    written: bool = False
    # Files of this rank's whose checksums are known.
    summed: tuple[FileEntry, ...] = ()
    entries: tuple[FileEntry, ...] = ()
    # Bytes written, synced and checksummed that it has reported.
    moved: int = 0

    @property
    def path(self) -> Path:
        """The checkpoint's directory, once it has a name."""
        return self.tier.store.path(self.name)

    @property
    def for_disk(self) -> bool:
        """Whether it is to be on the disk in the end: what a drain leaves in memory the agents bring there, too."""
        return not self.tier.in_memory or self.content.make_durable or self.drain
