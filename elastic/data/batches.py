"""A data set as optimizer steps: this rank's micro-batches of every global batch, with their factors."""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import islice
from typing import Any, Generic, TypeVar

import torch

from ..checkpoint import Order, Position
from ..rank import rng
from ..rank.agreement import PART, Unlike
from ..rank.collective import Done
from ..rank.remarks import remark
from .batch import Batch, Total, whole
from .fetching import Loading, Maker, PlannedMicroBatch, is_iterable
from .looking import Inspected, Inspection
from .micro_batch import Computed, MicroBatch
from .plan import BatchPlan
from .prints import Likeness, likeness
from .same_data import compared, merged, of_a_stream
from .sampler import ElasticSampler, check_cut

log = logging.getLogger(__name__)

T = TypeVar("T")

# Options of the DataLoader that Batches sets itself, and what to use instead.
_OWN_OPTIONS = {
    "batch_size": "BatchPlan says how many",
    "batch_sampler": "the order is the ElasticSampler's",
    "sampler": "the order is the ElasticSampler's",
    "shuffle": "say it to the ElasticSampler",
    "drop_last": "say it to the ElasticSampler",
    "collate_fn": "say collate=... to Batches",
    "generator": "workers are seeded by the order's seed",
    "in_order": "batches come in order",
}


# How often a sample is looked at, and for how many seconds at most; the second pair if a look finds a difference.
_AT_ONCE, _PATIENT = (2, 1.0), (12, 20.0)

# What people call the fields of an order.
_IN_ORDER = {"seed": "seed of the order", "length": "length of the data set", "version": "version of the order"}


class Batches(Generic[T]):
    """Iterates over ``Batch`` objects from the sampler's position on.

    The sampler stands where the *training* stands: it moves once a batch's micro-batches are all computed, whatever
    DataLoader workers have fetched ahead. So ``sampler.state_dict()``, taken between two steps, continues with the next
    batch, and so does a new iteration.

    With a ``fixed_micro_batch`` plan and a seed, randomness is the same at every world size. The generators are set
    from (seed, step, number) before every micro-batch, from (seed, data epoch, sample) while a map-style data set makes
    a sample, and from (seed, data epoch, first sample) while ``collate`` works.

    Args:
        dataset: Map-style (``__getitem__``), or iterable. An iterable one has its own order (give the sampler
            ``shuffle=False``) and must give the same samples on every rank. Each rank and each of its DataLoader
            workers reads all of it. If it has ``skip(n)``, that is used; without it a resumed run reads the samples
            that it skips. A data set of either kind, or one inside of it, that has ``set_epoch`` is told the data epoch
            before it is read.
        sampler: The order and where to begin.
        plan: Which rank computes what. Its global batch size must be the sampler's.
        rank: This rank's number in the data-parallel group.
        collate: Makes ``data`` from a list of samples; default: torch's.
        scale: ``"ddp"`` (also for FSDP) or ``"deepspeed"``, see ``BatchPlan.loss_scale``.
        resume: Begin after this checkpoint, at its position and step. Its order and cut must agree with these. Anything
            with ``position``, ``step``, ``manifest.order`` and ``manifest.cut``; None: begin at the sampler's position,
            step 1.
        data_epochs: Stop before this data epoch; None: never.
        seed: The seed of fixed micro-batches, see above.
        count_tokens: For token means: counts the real tokens in ``data``, or adds up their weights: a whole number.
            Factors are then by tokens instead of samples. With a plan that pads it gets the rows' mask as second
            argument, and must count only the rows of the mask.
        reduce: For token means: sums a number over all ranks. ``session.sum`` runs beside the first forward pass; any
            other function is called before it.
        loader_options: For ``torch.utils.data.DataLoader``: ``num_workers``, ``pin_memory``, ….
        check_data: Look at a few samples before the first step, and compare them between the ranks and with those of
            the checkpoint's run. False: different data are not noticed.

    Raises:
        ValueError: Sizes disagree, the position is in another order, the checkpoint has no position or its batches were
            cut in another way, ``count_tokens`` has no ``reduce``, an iterable data set is to be shuffled, or a loader
            option would change the order.

    Attributes:
        cut: How batches become gradients, for the manifest of checkpoints.
    """

    def __init__(
        self,
        dataset: Any,
        sampler: ElasticSampler,
        plan: BatchPlan,
        rank: int,
        *,
        collate: Callable[[list[Any]], T] | None = None,
        scale: str = "ddp",
        resume: Any = None,
        data_epochs: int | None = None,
        seed: int | None = None,
        count_tokens: Callable[..., int] | None = None,
        reduce: Callable[[float], float] | None = None,
        loader_options: dict[str, Any] | None = None,
        check_data: bool = True,
    ) -> None:
        options = dict(loader_options or {})
        _check_agreement(dataset, sampler, plan, options)
        if (count_tokens is None) != (reduce is None):
            raise ValueError("token means need both count_tokens and reduce")
        plan.loss_scale(1, 1, scale)
        self._seed = None if seed is None or not plan.fixed_micro_batch else operator.index(seed)
        self.cut = plan.cut(
            sampler.order, drop_last=sampler.drop_last, tokens=count_tokens is not None, seed=self._seed
        )
        self._sampler, self._scale = sampler, scale
        self._count_tokens, self._reduce = count_tokens, reduce
        self._data_epochs, self._check_data = data_epochs, check_data
        maker = Maker(collate, self._seed, sampler.order.seed)
        self._make_loading = functools.partial(Loading, dataset, sampler, maker=maker, options=options)
        self._through: Callable[[Any], Iterator[MicroBatch[T]]] | None = None
        self._said = self._said_uncomputed = self._said_epoch = self._said_empty = False
        self.go_on(plan, rank, resume)

    def go_on(self, plan: BatchPlan, rank: int, resume: Any) -> None:
        """Deals the data anew, to this rank of perhaps another world, from where that begins.

        Args:
            plan, rank, resume: As in the constructor; the plan cuts batches in the same way.

        Raises:
            ValueError: As in the constructor.
        """
        plan.slices(rank)
        self._plan, self._rank, self._steps_done = plan, rank, 0
        if resume is not None:
            _check_place(resume)
            if resume.manifest.order is not None:
                self._sampler.adopt_order(resume.manifest.order)
            saved = getattr(resume.manifest, "cut", None)
            check_cut(saved, self.cut)
            if saved is not None and self._check_data:
                self.cut = replace(self.cut, samples=saved.samples)
            self._sampler.seek(resume.position)
            self._steps_done = resume.step
        self._sampler.check_position(self._sampler.position)
        self._loading = self._make_loading(plan=plan, rank=rank, data_epochs=self._data_epochs)
        self._left = self._count_left()
        self._checked = not self._check_data
        # What was seen of the data, and the iterator that was begun for that at the training's position.
        self._seen: list[Inspected] = []
        self._begun: tuple[Position, int, Iterator[tuple[PlannedMicroBatch, T]]] | None = None

    @property
    def order(self) -> Order:
        """The order of samples, for the manifest of checkpoints."""
        return self._sampler.order

    @property
    def plan(self) -> BatchPlan:
        """Which rank computes what."""
        return self._plan

    @property
    def data_epochs(self) -> int | None:
        """Passes over the data, behind which they end; None: without end."""
        return self._data_epochs

    @property
    def rank(self) -> int:
        """The rank whose micro-batches these are."""
        return self._rank

    def given_to(self, through: Callable[[Batch[T]], Iterator[MicroBatch[T]]], scale: str) -> None:
        """Lets ``for micro in batch`` call ``through(batch)``, in batches that are made from now on.

        Args:
            through: An `Accumulation`.
            scale: What the factors are made for, as in the constructor.
        """
        self._through, self._scale = through, scale

    @property
    def alike(self) -> dict[str, Any]:
        """What must be alike on all ranks, by name, for ``Session.compare``; ``steps`` compares it by itself."""
        order = asdict(self.order)
        del order["global_batch_size"]
        return {
            **{_IN_ORDER.get(name, name): value for name, value in order.items()},
            **self._plan.alike,
            "drop_last": self._sampler.drop_last,
            "data_epochs": self._data_epochs,
            "the mean is over tokens": self.cut.tokens,
            "seed of Batches": self.cut.seed,
            "position in the data": asdict(self.position),
            PART: [self._rank, self._plan.world_size],
            "check_data": self._check_data,
        }

    def check_samples(self, session: Any, max_steps: int | None = None) -> None:
        """Checks before the first step that all ranks have the same data, those of the checkpoint's run. Collective.

        It compares a few samples, see `looking`. ``steps`` calls this once by itself; your own loop may call it before
        it iterates. From then on `cut` carries what was seen.

        Args:
            session: This process's session.
            max_steps: Steps of the whole run. If the run has reached them, nothing is looked at.

        Raises:
            Unlike: A ValueError: the data differ. On all ranks.
        """
        if self._checked or self._left == 0 or (max_steps is not None and session.step >= max_steps):
            return
        self._checked = True
        saved, checkpoint = dict(self.cut.samples), "" if session.resume is None else session.resume.ref.name
        for patient in (False, True):
            told = session.gather(self._look(patient=patient))
            found = compared(told, saved, checkpoint)
            if found.likeness is not Likeness.OTHER:
                break
            unlike = found.text
        if found.likeness is Likeness.OTHER:
            raise Unlike(found.text)
        if session.rank == 0 and found.text:
            remark("%s", found.text)
        if session.rank == 0 and patient and self._loading.is_stream:
            remark("%s", of_a_stream(unlike))
        own = any(one.get("own") for one in told)
        session.examination.learn(data_draws_own=own)
        session.examination.learn(data_draws=self._seed is None and not own and any(one["draws"] for one in told))
        self.cut = replace(self.cut, samples=tuple(sorted(merged(told, saved).items())))

    def _look(self, *, patient: bool) -> dict[str, Any]:
        """What this rank sees, as plain values. It begins to read at the training's position."""
        place, step, length = self._sampler.position, self._steps_done + 1, self.order.length
        ids = tuple(sorted({0, length // 2, length - 1})) if length else (0, 1, 2)
        look = Inspection(
            ids, *(_PATIENT if patient else _AT_ONCE), place.data_epoch if self._loading.epoch.wanted else 0
        )
        try:
            seen, parts = self._loading.look(place, self._generator(step), look)
        except Exception as error:  # it comes again when the training reads these data
            log.debug("the data could not be looked at", exc_info=error)
            return {"prints": {}, "varies": patient, "draws": False}
        if not patient:
            self._begun, self._seen = (place, step, parts), seen
        prints: dict[str, str] = {}
        # Each reader of a stream sees samples of its own, so the names carry the reader, then and now.
        every = [*self._seen, *seen] if self._loading.is_stream else seen
        for one in every:
            prints = {**one.prints, **prints}
        differs = any(likeness(prints[name], one.prints[name]) for one in every for name in one.prints)
        return {
            "prints": prints,
            "varies": differs or any(one.varies for one in every),
            "draws": any(one.draws for one in every),
            "own": any(one.own for one in every),
        }

    def _generator(self, step: int) -> torch.Generator:
        # The loader draws its workers' seed from this generator, because the global one must run on bit-exactly.
        return torch.Generator().manual_seed(rng.derive("loader", self.order.seed, step, self._rank))

    @property
    def position(self) -> Position:
        """Where the training stands: the sampler's position."""
        return self._sampler.position

    @property
    def left(self) -> int | None:
        """Batches not handed out yet, alike on all ranks; None: without end.

        For an iterable data set without a length, and with ``data_epochs``, it is 0, or 1 for at least one: as far as
        this rank has read, and where another rank's is shorter it is not alike.
        """
        return self._left

    def __iter__(self) -> Iterator[Batch[T]]:
        self._left = self._count_left()
        return self._iterate()

    def _iterate(self) -> Iterator[Batch[T]]:
        step, place = self._steps_done + 1, self._sampler.position
        begun, self._begun = self._begun, None
        data_epoch = 0
        if begun is not None and begun[:2] == (place, step):
            parts = begun[2]
        else:
            parts = self._loading.start(place, self._generator(step))
        while gathered := list(islice(parts, self._plan.accumulation)):
            one = gathered[0][0]
            self._note_epoch(data_epoch, one.position.data_epoch)
            data_epoch = one.position.data_epoch
            if self._left is not None:
                self._left = self._count_after(one.position_after)
            batch = Batch(
                step=step,
                n=one.total,
                sample_ids=tuple(i for part, _ in gathered if not part.slice.filler for i in part.sample_ids),
                position=one.position,
                position_after=one.position_after,
                scale=self._scale,
                through=self._through,
                _parts=gathered,
                _owner=self,
            )
            yield batch
            if batch.handed_out:
                batch.check_complete()
                self._say_unscaled(batch)
            step += 1

    def _note_epoch(self, before: int, now: int) -> None:
        """Notes the data epochs of the batch before and of this one; warns once of a script's number in its place."""
        epoch, length = self._loading.epoch, self.order.length
        told = epoch.contradicted(before, now)
        if self._rank or self._said_epoch or not epoch.wanted:
            return
        if told is not None:
            self._said_epoch = True
            remark(
                "set_epoch(%s) of the data set, called by the script, counts for nothing: before samples are read it "
                "is told their data epoch (here %d, the first is 0), so that they are the same behind each start and "
                "with any number of workers. To count otherwise, do so inside of set_epoch",
                told,
                now,
            )
        elif length and before != now and self._loading.length not in (None, length):
            self._said_epoch = True
            remark(
                "the data set has %d samples in data epoch %d, and the order of the run is of %d: what is more than "
                "that is never trained",
                self._loading.length,
                now,
                length,
            )

    def micro_batches(self, batch: Batch[T], parts: list[tuple[PlannedMicroBatch, T]]) -> Iterator[MicroBatch[T]]:
        """See ``Batch.micro_batches``."""
        tokens = self._tokens(batch, parts)
        for index, (part, data) in enumerate(parts):
            weight = part.slice.n if tokens is None else tokens[index]
            if self._seed is not None:
                rng.seed_micro_batch(self._seed, batch.step, part.slice.number)
            batch.handed_out = index + 1
            micro = MicroBatch(
                data,
                () if part.slice.filler else part.sample_ids,
                part.slice.n,
                part.slice.number,
                # A slice without a real token has nothing to learn from, whatever the other slices have.
                functools.partial(self._loss_scale, batch, weight) if weight else 0.0,
                is_last=index == len(parts) - 1,
                rows=part.slice.rows,
                tokens=None if tokens is None else tokens[index],
                padded=self._plan.pad,
                batch=batch,
            )
            if micro.silent:
                batch.note(micro.number, Computed.SILENT)
            try:
                yield micro
            except GeneratorExit:
                batch.abandoned = True
                raise
            finally:
                micro.close()
        self.trained(batch)

    def _loss_scale(self, batch: Batch[T], weight: int) -> float:
        total = batch.n if self._count_tokens is None else batch.tokens
        return self._plan.loss_scale(float(weight), float(total), self._scale)

    def _say_unscaled(self, batch: Batch[T]) -> None:
        """Warns once, on one rank: a script may divide its loss by itself, but most have forgotten the factor."""
        plan = self._plan
        if batch.scaled or self._said or self._rank or plan.accumulation * plan.world_size == 1:
            return
        self._said = True
        remark(
            "micro.scale(loss) was not used in step %d, which is cut into %d micro-batches on each of %d ranks: their "
            "gradients come to the mean over the global batch only if the loss was divided accordingly, for parts of "
            "any size and any number of ranks; else call micro.scale(loss).backward()",
            batch.step,
            plan.accumulation,
            plan.world_size,
        )

    def say_uncomputed(self, batch: Batch[T]) -> None:
        """Warns once where a script has swallowed an error, or has left out a micro-batch by itself."""
        missing = [] if self._said_uncomputed else batch.uncomputed()
        if not missing:
            return
        self._said_uncomputed = True
        which = ", ".join(str(number) for number in missing)
        remark(
            "step %d has no gradient, or a part of one, from micro-batch %s of its global batch: no backward pass of "
            "micro.scale(loss) came to its end there. An error that is caught inside the loop leaves the step without "
            "these samples: let it through, and the run goes on from its last save",
            batch.step,
            which,
        )

    def trained(self, batch: Batch[T]) -> None:
        """Notes that all of ``batch`` is computed: the training now stands behind it."""
        batch.trained = True
        self._steps_done = batch.step
        self._sampler.seek(batch.position_after)
        self._say_empty(batch)

    def _say_empty(self, batch: Batch[T]) -> None:
        """Warns once, on one rank, of a step that all ranks pass over: a loss of 0 looks like one that is learned."""
        if self._rank or self._said_empty or self._count_tokens is None or batch.tokens:
            return
        self._said_empty = True
        remark(
            "step %d learns nothing: no token of its global batch counts, by its labels (-100 counts for none) or by "
            "count_tokens; look at what the collate function makes of the samples",
            batch.step,
        )

    def _tokens(self, batch: Batch[T], parts: list[tuple[PlannedMicroBatch, T]]) -> list[int] | None:
        """Real tokens of each part; None without token means. Begins to sum those of all ranks. Collective."""
        if self._count_tokens is None or self._reduce is None:
            return None
        found = []
        for part, data in parts:
            mask = (torch.arange(part.slice.rows) < part.slice.n,) if self._plan.pad else ()
            found.append(0 if part.slice.filler else whole(self._count_tokens(data, *mask)))
        batch._total = Total(_begun(self._reduce, sum(found)))
        return found

    def _count_left(self) -> int | None:
        return None if self._data_epochs is None else self._count_after(self._sampler.position)

    def _count_after(self, position: Position) -> int:
        assert self._data_epochs is not None
        epochs = self._data_epochs - position.data_epoch
        if not self.order.length:
            return int(epochs > 0)
        done = position.samples // self.order.global_batch_size
        return max(0, epochs * self._sampler.batches_per_data_epoch - done)


def _check_place(resume: Any) -> None:
    """Refuses a checkpoint without a position: from the beginning of the data, samples would be trained twice."""
    if resume.step > 0 and resume.manifest.order is None and resume.position == Position():
        raise ValueError(
            f"the checkpoint of step {resume.step} has no place in the data, so Batches cannot go on there: save with "
            "position= and order= of Batches, go on with the data that it was trained on, or start a new run"
        )


def _begun(reduce: Callable[[float], float], value: int) -> Any:
    """Begins a sum if ``reduce`` is the session's; any other function is called at once."""
    start = getattr(getattr(reduce, "__self__", None), "start_sum", None)
    return Done([round(reduce(float(value)))]) if start is None else start(value)


def _check_agreement(dataset: Any, sampler: ElasticSampler, plan: BatchPlan, options: dict[str, Any]) -> None:
    if sampler.order.global_batch_size != plan.global_batch_size:
        raise ValueError(
            f"the sampler deals {sampler.order.global_batch_size} samples a step, the plan {plan.global_batch_size}"
        )
    if is_iterable(dataset):
        if sampler.order.shuffle:
            raise ValueError("an iterable data set has an order of its own: give the ElasticSampler shuffle=False")
    elif not sampler.order.length:
        raise ValueError("a map-style data set has a length: give it to the ElasticSampler")
    elif hasattr(dataset, "__len__") and len(dataset) != sampler.order.length:
        raise ValueError(f"the data set has {len(dataset)} samples, the sampler {sampler.order.length}")
    for name in options.keys() & _OWN_OPTIONS.keys():
        raise ValueError(f"loader_options cannot have {name!r}: {_OWN_OPTIONS[name]}")
