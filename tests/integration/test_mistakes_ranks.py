"""What ranks are told unlike, what a resumed run is told otherwise, and loaders of other people: with real ranks."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dalsegno.elastic.checkpoint import CheckpointStore, Cut, Manifest
from tests.support.forks.forked import PRELOADED
from tests.support.jobs.shell import Shell
from tests.support.pages.mistakes import Comes, brings
from tests.support.workers import unlike_worker as worker
from tests.support.workers.zero_runs import run_world

pytestmark = [pytest.mark.full, pytest.mark.timeout(420)]

# All cases are played by the same ranks, beside other tests.
PLAY_SECONDS = 240.0
WORKER = Path(worker.__file__)
HF = "tests.support.forks.preloaded_hf"


@dataclass(frozen=True)
class Told:
    """One case: what each rank is told (lists: one value for each rank), and where it saves."""

    case: str
    options: Mapping[str, Any] = field(default_factory=dict)
    # Of another case, whose run it goes on with.
    after: str = ""


@dataclass(frozen=True)
class Came:
    """What came of a case, on each rank."""

    directory: Path
    ranks: Sequence[Mapping[str, Any]]

    @property
    def refused(self) -> str:
        """The line that all ranks ended with before their first step."""
        lines = {rank["refused"] for rank in self.ranks}
        assert len(lines) == 1, lines
        (line,) = lines
        assert line, "not refused"
        assert "\n" not in line
        assert [rank["steps"] for rank in self.ranks] == [[] for _ in self.ranks], "steps were made"
        return str(line)

    @property
    def steps(self) -> list[list[Any]]:
        """The samples of each step, of all ranks together; nothing was refused."""
        assert [rank["refused"] for rank in self.ranks] == ["" for _ in self.ranks]
        made = [rank["steps"] for rank in self.ranks]
        return [sorted(sample for part in step for sample in part) for step in zip(*made, strict=True)]

    def sealed(self) -> list[Manifest]:
        return CheckpointStore(self.directory).sealed()


def come(
    directory: Path, told: Mapping[str, Told], world: int = 2, preloaded: str = PRELOADED, worker: Path = WORKER
) -> dict[str, Came]:
    """What comes of all cases, one after the other in the same ranks."""
    _play(directory, told, world, preloaded, worker)
    return _told(directory, told, world)


def come_once(
    factory: pytest.TempPathFactory,
    name: str,
    told: Mapping[str, Told],
    preloaded: str = PRELOADED,
    worker: Path = WORKER,
) -> dict[str, Came]:
    """The same with two ranks, played once for all pytest processes: whoever comes first plays, the others read."""
    base = factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"play-{name}"
    with open(f"{directory}.lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / "made").exists():
            shutil.rmtree(directory, ignore_errors=True)
            _play(directory, told, 2, preloaded, worker)
            (directory / "made").touch()
    return _told(directory, told, 2)


def _play(directory: Path, told: Mapping[str, Told], world: int, preloaded: str, worker: Path) -> None:
    stores = {name: TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for name in told}
    places = _places(directory, told)
    tasks = [
        {
            "case": one.case,
            "store": stores[name].port,
            "directory": str(places[name]),
            "options": dict(one.options),
        }
        for name, one in told.items()
    ]
    directory.mkdir(parents=True, exist_ok=True)
    ended = run_world(
        world, [str(worker), json.dumps(tasks), str(directory)], seconds=PLAY_SECONDS, preloaded=preloaded
    )
    assert [code for code, _ in ended] == [0] * world, "\n".join(output for _, output in ended)


def _places(directory: Path, told: Mapping[str, Told]) -> dict[str, Path]:
    return {name: directory / (one.after or name) for name, one in told.items()}


def _told(directory: Path, told: Mapping[str, Told], world: int) -> dict[str, Came]:
    places = _places(directory, told)
    ranks = [json.loads((directory / f"result-{rank}.json").read_text()) for rank in range(world)]
    of_case = zip(told, zip(*ranks, strict=True), strict=True)
    return {name: Came(places[name], results) for name, results in of_case}


# Started unlike.

UNLIKE = {
    "micro": (
        "ours",
        {"micro": [3, 6]},
        r"micro-batches per step \(by max_micro_batch_size\) is 2 on rank 0, 1 on rank 1",
    ),
    "seed": ("ours", {"seed": [3, 4]}, "seed of the order is 3 on rank 0, 4 on rank 1"),
    "length": ("ours", {"length": [40, 39]}, "length of the data set is 40 on rank 0, 39 on rank 1"),
    "global batch": ("ours", {"global_batch": [12, 10]}, "global_batch_size is 12 on rank 0, 10 on rank 1"),
    "fixed": ("ours", {"fixed": [True, False]}, "fixed_micro_batch is True on rank 0, False on rank 1"),
    "random seed": ("ours", {"fixed": True, "random_seed": [1, 2]}, "seed of Batches is 1 on rank 0, 2 on rank 1"),
    "drop_last": ("ours", {"drop_last": [True, False]}, "drop_last is True on rank 0, False on rank 1"),
    "data_epochs": ("ours", {"data_epochs": [1, 2]}, "data_epochs is 1 on rank 0, 2 on rank 1"),
    "tokens": ("ours", {"tokens": [True, False]}, "the mean is over tokens is True on rank 0, False on rank 1"),
    "max_steps": ("ours", {"max_steps": [4, 5]}, "max_steps is 4 on rank 0, 5 on rank 1"),
    "save_every": ("ours", {"save_every": [2, 3]}, "save_every is 2 on rank 0, 3 on rank 1"),
    "memory_every": ("ours", {"memory_every": [5, "auto"]}, "memory_every is 5 on rank 0, auto on rank 1"),
    "save": ("ours", {"save": [True, False]}, r"what is saved is what save\(\) writes on rank 0, nothing on rank 1"),
    "background": ("ours", {"background": [True, False]}, "what is saved is a state in the background on rank 0"),
    "strategy": ("ours", {"strategy": ["ddp", "own"]}, "strategy is ddp on rank 0, own on rank 1"),
    "track": (
        "ours",
        {"track": ["loss", "error"]},
        r"tracked metric is loss \(min\) on rank 0, error \(min\) on rank 1",
    ),
    "directory": ("ours", {"directory": [True, False]}, "a checkpoint_dir is given is True on rank 0, False on rank 1"),
    "rank": (
        "ours",
        {"rank": [0, 0]},
        "parts are not the whole of a global batch: rank 0 has 0 of 2; rank 1 has 0 of 2",
    ),
    "plan's world": ("ours", {"plan_world": [3]}, "rank 0 has 0 of 3; rank 1 has 1 of 3"),
    "own loop": ("own_loop", {"seed": [3, 4]}, "seed of the order is 3 on rank 0, 4 on rank 1"),
    "own names": ("own_loop", {"told": False, "rate": [0.1, 0.2]}, "learning rate is 0.1 on rank 0, 0.2 on rank 1"),
    "spread": ("foreign", {"loader": "spread", "rank": [0, 0]}, "rank 0 has 0 of 2; rank 1 has 0 of 2"),
    "spread otherwise": (
        "foreign",
        {"loader": "spread", "seed": [3, 4]},
        "seed of the DistributedSampler is 3 on rank 0",
    ),
    "two things": (
        "ours",
        {"seed": [3, 4], "max_steps": [4, 5]},
        "max_steps is 4 .*; seed of the order is 3 on rank 0",
    ),
}
TRAINERS = {
    "trainer's micro": (
        "trained",
        {"micro": [3, 6]},
        r"micro-batches per step \(by max_micro_batch_size\) is 2 on rank 0",
    ),
    "trainer's seed": ("trained", {"seed": [3, 4]}, "seed is 3 on rank 0, 4 on rank 1"),
    "trainer's length": ("trained", {"length": [40, 39]}, "length of the data set is 40 on rank 0, 39 on rank 1"),
    "trainer's clipping": ("trained", {"max_grad_norm": [0.5, None]}, "max_grad_norm is 0.5 on rank 0, None on rank 1"),
    "trainer's save_every": ("trained", {"save_every": [1, 2]}, "save_every is 1 on rank 0, 2 on rank 1"),
}
EVALUATED = {
    "held out": ({"held_out": [40, 36]}, "length of the data set is 40 on rank 0, 36 on rank 1"),
    "held out, fewer rounds": ({"held_out": [40, 16]}, "length of the data set is 40 on rank 0, 16 on rank 1"),
    "held out, batches": ({"held_out": 40, "batch_size": [4, 8]}, "batch_size is 4 on rank 0, 8 on rank 1"),
    "held out, order": (
        {"held_out": 40, "turned": [False, True]},
        "sample 0 is not the same on rank 0 and rank 1, so some samples would be measured twice and others never",
    ),
    "held out, streamed": (
        {"held_out": [40, 32], "stream": True},
        r"number of samples read of the iterable data set is 40 on rank 0, 32 \(its end\) on rank 1",
    ),
    "held out, streamed, order": (
        {"held_out": 40, "stream": True, "turned": [False, True]},
        "sample 0 is not the same on rank 0 and rank 1, so some samples would be measured twice and others never",
    ),
    "held out, streamed, in between": (
        {"held_out": [40, 32], "stream": True, "evaluate_every": 1},
        r"number of samples read of the iterable data set is 40 on rank 0, 32 \(its end\) on rank 1",
    ),
}
STREAMED = {"length": [40, 30], "stream": True, "max_steps": None, "data_epochs": 1}
STREAMED_TRAINED = {"length": [40, 30], "streamed": True, "max_steps": None, "data_epochs": 1}
UNSAVED = {"save": False, "save_every": 0}
ALL = {
    "streamed": Told("ours", STREAMED),
    "streamed, unsaved": Told("ours", {**STREAMED, **UNSAVED}),
    "streamed alike": Told("ours", {**STREAMED, **UNSAVED, "length": 40}),
    "streamed, a Trainer": Told("trained", {**STREAMED_TRAINED, "save_every": 2}),
    "streamed, a Trainer that evaluates": Told("trained", {**STREAMED_TRAINED, "held_out": 40}),
    "streamed alike, a Trainer": Told("trained", {**STREAMED_TRAINED, "length": 40, "held_out": 40}),
    **{name: Told(case, options) for name, (case, options, _) in {**UNLIKE, **TRAINERS}.items()},
    **{name: Told("trained", options) for name, (options, _) in EVALUATED.items()},
    "held out alike": Told("trained", {"held_out": 40}),
    "held out alike, streamed": Told("trained", {"held_out": 40, "stream": True}),
    "held out, meant": Told("trained", {"held_out": 40, "turned": [False, True], "check_data": False}),
    "alike": Told("ours"),
    "larger device": Told("ours", {"micro": [4, 3], "global_batch": 6}),
    "other values of one thing": Told("own_loop", {"place": [12, 13]}),
    "other strategies in a save": Told("own_loop", {"strategy": ["ddp", "own"]}),
    "kinds of lists": Told("foreign", {"loader": "list"}),
    "second trainer": Told("twice", {"second": "trainer"}),
    "second unsaved": Told("twice", {"second": "trainer", "directory": False}),
    "second loop unsaved": Told("twice", {"second": "loop", "directory": False}),
    "second elsewhere": Told("twice", {"second": "elsewhere"}),
    "second loop": Told("twice", {"second": "loop"}),
    "second sum": Told("twice", {"second": "sum"}),
    "no local rank": Told("prepared"),
}


@pytest.fixture(scope="module")
def came(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Came]:
    """All that needs one start of two ranks."""
    return come_once(tmp_path_factory, "unlike", ALL)


@brings(
    "a rank with another seed, length of the data set, global batch or `drop_last`",
    Comes.REFUSED,
    "the ranks would train some samples twice and others never",
    "give all ranks the same; the line says who has what",
)
@brings(
    "a rank whose `max_micro_batch_size` comes to another number of micro-batches",
    Comes.REFUSED,
    "of every global batch some samples would be trained by two ranks and others by none. (Where the cut is the same, "
    "another value is fine: devices may differ)",
    "give all ranks the smallest",
)
@brings(
    "a rank with another `max_steps`, `save_every`, `memory_every`, `save`, strategy, tracked metric or "
    "`fixed_micro_batch`",
    Comes.REFUSED,
    "some ranks would wait for ever in a collective that the others never enter, or have another gradient",
    "give all ranks the same",
)
@brings(
    "`Batches` or a `DistributedSampler` that was given the rank of another one",
    Comes.REFUSED,
    "one part of every global batch would be trained twice, another one never",
    "`Batches(..., s.rank)` with `BatchPlan(..., s.world_size, ...)`",
)
@brings(
    "a `checkpoint_dir` on some ranks only",
    Comes.REFUSED,
    "a checkpoint is the work of all ranks",
    "give all ranks the same directory",
)
@brings(
    "a loop of your own whose ranks were told different things",
    Comes.REFUSED,
    "`s.meet(n, batches.alike)` compares what `Batches` know, and any names and values that you add",
    "give `alike=` to `meet`",
)
@pytest.mark.parametrize("name", [*UNLIKE, *TRAINERS])
def test_ranks_that_were_told_different_things(came: dict[str, Came], name: str) -> None:
    """One line on all ranks, before the first step, with the values and who has them; nothing is saved."""
    pattern = {**UNLIKE, **TRAINERS}[name][2]
    assert re.search(pattern, came[name].refused), came[name].refused
    assert came[name].sealed() == []


@brings(
    "an `Evaluator`, or an evaluation of Hugging Face's `Trainer`, with a data set of another length on some rank, or "
    "other batches; an `Evaluator` with other samples, or in another order",
    Comes.REFUSED,
    "some samples would be measured twice and others never, and ranks would wait for each other. Compared before the "
    "first step, and before each evaluation; of an iterable data set without a length before each batch, and what was "
    "trained is saved first (not with Hugging Face). Of samples three are compared, as for the training, and of an "
    "iterable data set the first three as they are read",
    "give all ranks the same; the line says who has what. `check_data=False` (of `Evaluator` or `Trainer`) where "
    "samples may differ",
)
@pytest.mark.parametrize("name", list(EVALUATED))
def test_ranks_that_evaluate_other_data(came: dict[str, Came], name: str) -> None:
    """One line on all ranks, and no metric. Nothing is trained before; or, with a stream, all that was is saved."""
    (line,) = {rank["refused"] for rank in came[name].ranks}
    assert re.search(f"^Unlike: the ranks (do not evaluate alike|have other data): {EVALUATED[name][1]}", line), line
    trained = {"held out, streamed, in between": 1}.get(name, 2 * ("streamed" in name))
    assert [len(rank["steps"]) for rank in came[name].ranks] == [2 * trained] * 2
    assert [one.step for one in came[name].sealed()] == [trained] * bool(trained)


@brings(
    "an iterable data set without a length that is longer on some rank",
    Comes.REFUSED,
    "where the first of them ends, all ranks leave the loop, and what others have left would not be trained. Compared "
    "as a step is saved, and as the loop ends; with `Batches`, also in a `Trainer`",
    "give all ranks the same; the line says how far each has come",
)
@pytest.mark.parametrize(("name", "saved"), [("streamed", [2]), ("streamed, unsaved", [])])
def test_a_stream_that_ends_sooner_on_one_rank(came: dict[str, Came], name: str, saved: list[int]) -> None:
    """Such a run finished, where nothing was saved."""
    (line,) = {rank["refused"] for rank in came[name].ranks}
    assert line.startswith("Unlike: ")
    assert "iterable data set is data_epoch=0 samples=36 on rank 0, data_epoch=1 samples=0 on rank 1" in line
    assert [len(rank["steps"]) for rank in came[name].ranks] == [3, 3]
    assert [one.step for one in came[name].sealed()] == saved
    assert len(came["streamed alike"].steps) == 4


@pytest.mark.parametrize(("name", "saved"), [("streamed, a Trainer", [2]), ("streamed, a Trainer that evaluates", [])])
def test_a_trainers_stream_that_ends_sooner_on_one_rank(came: dict[str, Came], name: str, saved: list[int]) -> None:
    """Its last log and evaluation are all ranks', so that none waits in them for one that has left the loop."""
    (line,) = {rank["refused"] for rank in came[name].ranks}
    assert line.startswith("Unlike: ")
    assert "iterable data set is data_epoch=0 samples=36 on rank 0, data_epoch=1 samples=0 on rank 1" in line
    assert [one.step for one in came[name].sealed()] == saved
    assert {rank["refused"] for rank in came["streamed alike, a Trainer"].ranks} == {""}
    assert [one.step for one in came["streamed alike, a Trainer"].sealed()] == [4]


def test_ranks_that_evaluate_the_same(came: dict[str, Came]) -> None:
    """Nothing is falsely refused."""
    for name in ("held out alike", "held out alike, streamed", "held out, meant"):
        assert {rank["refused"] for rank in came[name].ranks} == {""}


def test_ranks_that_were_told_the_same_train(came: dict[str, Came]) -> None:
    """Each sample of a step once. So it is where another largest micro-batch comes to the same cut, or to a list."""
    for name, size in (("alike", 12), ("larger device", 6)):
        steps = came[name].steps
        assert len(steps) == 4
        assert all(len(step) == len(set(step)) == min(size, 40 - size * number) for number, step in enumerate(steps))
    assert len(came["kinds of lists"].steps) == 4


@brings(
    "a save whose position, order or strategy is not the same on all ranks",
    Comes.REFUSED,
    "compared before the checkpoint is sealed: it would say what is true of rank 0 only",
    "pass `position`, `order` and `cut` of your `Batches` to `s.save` on all ranks",
)
@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "other values of one thing",
            "position is data_epoch=0 samples=12 on rank 0, data_epoch=0 samples=13 on rank 1",
        ),
        ("other strategies in a save", "strategy is ddp on rank 0, own on rank 1"),
    ],
)
def test_contents_are_compared_before_the_seal(came: dict[str, Came], name: str, said: str) -> None:
    """All ranks end with the same line, and nothing is left of that save."""
    of = came[name]
    (line,) = {rank["refused"] for rank in of.ranks}
    assert line.startswith("SaveError: ")
    assert said in line
    assert of.sealed() == []
    assert list(of.directory.glob("step-*")) == []


@brings(
    "a second `Trainer`, or a second loop, in a process that has finished a run",
    Comes.REFUSED,
    "its session is over, and the ranks have parted",
    "a `checkpoint_dir` for each training, and `with session(checkpoint_dir):` around each, or a process of its own; "
    "under `dlrover-run` one of that for each run",
)
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("second trainer", "this session is over: its run was drained or finished, at step 2"),
        ("second loop", "this session is over: its run was drained or finished, at step 2"),
        ("second unsaved", "this session is over: its run was drained or finished, at step 2"),
        ("second loop unsaved", "this session is over: its run was drained or finished, at step 2"),
        ("second elsewhere", "and trains that run alone, not one in"),
    ],
)
def test_a_process_trains_one_run(came: dict[str, Came], name: str, said: str) -> None:
    """The second one says so at once, instead of ending as if it had trained."""
    assert said in came[name].refused


def test_ranks_may_sum_after_a_run(came: dict[str, Came]) -> None:
    """What a script evaluates at last is summed over the same ranks, in a group of its own."""
    assert [rank["steps"] for rank in came["second sum"].ranks] == [[[3, 3]], [[3, 3]]]


@brings(
    "`prepare()` for DeepSpeed without `LOCAL_RANK` in the environment",
    Comes.REFUSED,
    "DeepSpeed takes its device from it",
    "start with `dlrover-run` or `torchrun`, or export it: with Slurm `LOCAL_RANK=$SLURM_LOCALID`",
)
def test_prepare_without_a_local_rank(came: dict[str, Came]) -> None:
    """One line says what is missing, and who sets it."""
    assert "LOCAL_RANK is missing in the environment of one of 2 ranks" in came["no local rank"].refused


# Resumed with another cut.

FIXED = {"fixed": True, "micro": 3, "random_seed": 5}
OTHER_CUTS = {
    "another fixed size": ({**FIXED, "micro": 4}, "size of fixed micro-batches: was 3 and is 4"),
    "no longer fixed": ({"micro": 3}, "size of fixed micro-batches: was 3 and is None"),
    "padded": ({**FIXED, "pad": True}, "pad: was False and is True"),
    "another seed of fixed ones": ({**FIXED, "random_seed": 6}, "seed of Batches: was 5 and is 6"),
    "means over tokens": ({**FIXED, "tokens": True}, "the mean is over tokens: was False and is True"),
    "short batches left out": ({**FIXED, "drop_last": True}, "drop_last: was False and is True"),
}
CUTS = {
    "fixed": Told("ours", {**FIXED, "max_steps": 2}),
    "fewer steps": Told("ours", {**FIXED, "max_steps": 1}, after="fixed"),
    "two epochs": Told("ours", {"max_steps": None, "data_epochs": 2}),
    "fewer epochs": Told("ours", {"max_steps": None, "data_epochs": 1}, after="two epochs"),
    **{name: Told("ours", options, after="fixed") for name, (options, _) in OTHER_CUTS.items()},
    "the same cut": Told("ours", FIXED, after="fixed"),
    "cut by the world": Told("ours", {"micro": 3, "max_steps": 2}),
    "cut by the world otherwise": Told("ours", {"micro": 6, "pad": True, "max_steps": 3}, after="cut by the world"),
    "fixed from now on": Told("ours", {**FIXED, "max_steps": 4}, after="cut by the world"),
}


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Came]:
    return come_once(tmp_path_factory, "cut", CUTS)


@brings(
    "`fixed_micro_batch` with another size, padding or seed than the checkpoint's, or switched off",
    Comes.REFUSED,
    "dropout, BatchNorm and whatever else looks at a whole micro-batch would give another curve (by 0.3 in the loss, "
    "where it was tried)",
    "restore them, or start a new run",
)
@brings(
    "means over tokens instead of samples, or `drop_last`, switched on or off when a run resumes",
    Comes.REFUSED,
    "the gradients of the same batches would be other ones, or other samples would come",
    "restore them, or start a new run",
)
@pytest.mark.parametrize("name", list(OTHER_CUTS))
def test_a_run_goes_on_in_the_cut_that_it_began_in(cut: dict[str, Came], name: str) -> None:
    """What moves the curve is refused, with what it was and what it is."""
    assert "the checkpoint's batches became gradients in another way" in cut[name].refused
    assert OTHER_CUTS[name][1] in cut[name].refused


@brings(
    "another `max_micro_batch_size` when a run resumes, without `fixed_micro_batch`",
    Comes.ROUNDED,
    "each global batch is the same, and its sum is taken in other parts",
)
def test_what_only_rounds_is_not_refused(cut: dict[str, Came]) -> None:
    """The same cut goes on; where the world cuts, any; and the manifests say which it was."""
    assert len(cut["the same cut"].steps) == 2
    assert len(cut["cut by the world otherwise"].steps) == 1
    assert len(cut["fixed from now on"].steps) == 1
    by_world, fixed = Cut(False, False), Cut(False, False, 3, False, 5)
    assert set(cuts(cut["the same cut"])) == {fixed}
    assert cuts(cut["fixed from now on"]) == [by_world, by_world, fixed]


@brings(
    "a `max_steps` or `data_epochs` below what the run has made",
    Comes.REFUSED,
    "the run would be finished at once, and [stay so](reference.md#a-master-that-is-a-service)",
    "the number at which it is to end; to train less, go back with `--resume-step`",
)
def test_a_run_beyond_its_end_is_not_finished(cut: dict[str, Came]) -> None:
    """A typo finished it for good. The other cases go on with it."""
    steps = "Refusal: the run is at step 2, and the script wants 1 step: give at least 2, or another checkpoint_dir"
    assert cut["fewer steps"].refused == steps
    epochs = "Refusal: the run is at step 8, in data epoch 2, and data_epochs is 1: give at least 2, or another "
    assert cut["fewer epochs"].refused == f"{epochs}checkpoint_dir"


def cuts(came: Came) -> list[Cut]:
    """Of the checkpoints, without what is known of their data."""
    return [replace(one.cut, samples=()) for one in came.sealed() if one.cut is not None]


# Loaders of other people.

LOADERS = {
    "plain": Told("foreign", {"max_steps": 2}),
    "plain again": Told("foreign", after="plain"),
    "plain, moved by the script": Told("foreign", {"advanced": True}, after="plain"),
    "spread": Told("foreign", {"loader": "spread", "max_steps": 2}),
    "spread again": Told("foreign", {"loader": "spread"}, after="spread"),
    "spread, now ours": Told("ours", after="spread"),
    "bar": Told("foreign", {"loader": "bar", "max_steps": 2}),
    "bar again": Told("foreign", {"loader": "bar"}, after="bar"),
    "bar that forgot": Told("foreign", {"loader": "bar", "resume": False, "max_steps": 6}, after="bar"),
    "stateful": Told("foreign", {"loader": "stateful", "max_steps": 5}),
    "stateful again": Told("foreign", {"loader": "stateful", "max_steps": None, "lose": 5}, after="stateful"),
    "stateful at its end": Told("foreign", {"loader": "stateful", "max_steps": None}, after="stateful"),
    "stateful in the background": Told("foreign", {"loader": "stateful", "max_steps": 5, "background": True}),
    "stateful again, behind that": Told(
        "foreign", {"loader": "stateful", "max_steps": None, "lose": 5}, after="stateful in the background"
    ),
    "stateful with workers": Told("foreign", {"loader": "stateful", "max_steps": 5, "workers": 1}),
    "stateful with workers again": Told(
        "foreign", {"loader": "stateful", "max_steps": None, "workers": 1, "lose": 5}, after="stateful with workers"
    ),
    "stateful, spread": Told("foreign", {"loader": "stateful, spread", "max_steps": 5}),
    "stateful, spread again": Told(
        "foreign", {"loader": "stateful, spread", "max_steps": None}, after="stateful, spread"
    ),
    "stateful, drawn": Told("foreign", {"loader": "stateful, drawn", "max_steps": 2}),
    "stateful, drawn again": Told("foreign", {"loader": "stateful, drawn"}, after="stateful, drawn"),
    "plain, now stateful": Told("foreign", {"loader": "stateful"}, after="plain"),
    "stateful for any world": Told("foreign", {"loader": "stateful", "any_world_size": True}),
}


@pytest.fixture(scope="module")
def loaders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Came]]:
    directory = tmp_path_factory.mktemp("loaders")
    return directory, come(directory, LOADERS)


@brings(
    "a `DataLoader`, or any other iterable that is not `Batches`, also with a `DistributedSampler`",
    Comes.SAID,
    "nothing says where it stands: said at the start of the run, before it matters",
    "`Batches`, or torchdata's `StatefulDataLoader`",
)
@brings(
    "a run that resumes with such a `DataLoader`",
    Comes.REFUSED,
    "it would train its first samples again",
    "`Batches`, or torchdata's `StatefulDataLoader`; where the script itself has moved it to `session.step`: "
    "`steps(..., advanced=True)`, or `position=`",
)
@pytest.mark.parametrize("name", ["plain", "spread"])
def test_a_loader_that_cannot_say_where_it_stands(loaders: tuple[Path, dict[str, Came]], name: str) -> None:
    """One line at the first start, on one rank; refused where it would replay."""
    _, came = loaders
    assert len(came[name].steps) == 2
    (line,) = came[name].ranks[0]["warnings"]
    assert line.startswith("DataLoader cannot be resumed: nothing says where it stands")
    assert came[name].ranks[1]["warnings"] == []
    assert "DataLoader begins where it always begins" in came[f"{name} again"].refused
    assert "advanced=True" in came[f"{name} again"].refused


def test_data_that_the_script_has_moved_or_that_know_their_place(loaders: tuple[Path, dict[str, Came]]) -> None:
    """A word of the script is enough; so is the place that each `Batch` has, whoever hands it on."""
    _, came = loaders
    assert len(came["plain, moved by the script"].steps) == 2
    assert all(rank["warnings"] == [] for name in ("bar", "bar again") for rank in came[name].ranks)
    ids = [sample for name in ("bar", "bar again") for step in came[name].steps for sample in step]
    assert sorted(ids) == list(range(40))
    assert "the data begin at sample 0 of data epoch 0, and step-4" in came["bar that forgot"].refused


@brings(
    "`Batches` in place of the loader that a run has begun with",
    Comes.REFUSED,
    "the checkpoint does not say which samples it has trained: some would come twice",
    "go on with that loader, or start a new run",
)
def test_data_of_another_kind_than_the_run_began_with(loaders: tuple[Path, dict[str, Came]]) -> None:
    """Neither the place of `Batches` nor the state of a loader can be made up."""
    _, came = loaders
    assert "of step 2 has no place in the data" in came["spread, now ours"].refused
    assert "was saved without the state of a data loader" in came["plain, now stateful"].refused


@brings(
    "torchdata's `StatefulDataLoader`, in as many ranks",
    Comes.BITWISE,
    "its state is saved by each rank with every checkpoint: each sample once, in the order that it began in. (What a "
    "data set draws at random is the loader's affair; one line says so where the next batch is another one)",
)
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("stateful", "stateful again"),
        ("stateful in the background", "stateful again, behind that"),
        ("stateful with workers", "stateful with workers again"),
        ("stateful, spread", "stateful, spread again"),
    ],
)
def test_a_loader_with_a_state_goes_on(loaders: tuple[Path, dict[str, Came]], first: str, then: str) -> None:
    """What is fetched ahead is neither lost nor trained twice; what it gives at the end of its data is nothing."""
    _, came = loaders
    each = 20 if "spread" in first else 40
    for before, after in zip(came[first].ranks, came[then].ranks, strict=True):
        assert after["refused"] == ""
        # Without the last step's checkpoint, the run goes on from that of the fourth. "Spread" has lost none.
        kept = before["steps"] if "spread" in first else before["steps"][:4]
        ids = [sample for step in [*kept, *after["steps"]] for sample in step]
        assert len(ids) == len(set(ids)) == each
        assert len(kept) + len(after["steps"]) == -(-each // 3)
        if "spread" not in first:
            assert after["steps"][0] == before["steps"][4]
        assert after["warnings"] == []
    assert "this run goes on with 2 ranks only" in came[first].ranks[0]["warnings"][0]
    assert came[first].ranks[1]["warnings"] == []
    assert not any(manifest.shape.any_world_size for manifest in came[first].sealed())


@pytest.mark.full
def test_a_loader_that_had_ended_does_not_begin_anew(loaders: tuple[Path, dict[str, Came]]) -> None:
    """The run was over, and is."""
    _, came = loaders
    assert came["stateful at its end"].steps == []


@brings(
    "a loader with a state whose sampler draws the order at random and has no state (torch's `RandomSampler` given by "
    "hand, `WeightedRandomSampler`, `SubsetRandomSampler`)",
    Comes.REFUSED,
    "its state says how many samples were used, and not which: said at the start, refused where a run resumes",
    "`shuffle=True` of the `StatefulDataLoader`, a sampler with a seed, or `Batches`",
)
def test_a_state_without_the_order(loaders: tuple[Path, dict[str, Came]]) -> None:
    """It counts as no state."""
    _, came = loaders
    assert "cannot be resumed" in came["stateful, drawn"].ranks[0]["warnings"][0]
    assert "StatefulDataLoader begins where it always begins" in came["stateful, drawn again"].refused


@pytest.mark.full
@brings(
    "torchdata's `StatefulDataLoader`, in another number of ranks",
    Comes.REFUSED,
    "each state is one rank's. Said at the start of the run; under `dlrover-run` such a world is not opened",
    "as many ranks; with `Batches` any number goes on",
)
def test_a_loaders_state_is_of_no_use_to_another_world(loaders: tuple[Path, dict[str, Came]]) -> None:
    """Refused when the session is opened; and nobody may claim otherwise."""
    directory, came = loaders
    assert (
        "any_world_size=True, and the state of StatefulDataLoader is each rank's own"
        in came["stateful for any world"].refused
    )
    alone = come(directory, {"alone": Told("foreign", {"loader": "stateful"}, after="stateful")}, world=1)["alone"]
    assert "has the state of the data loader of each of 2 ranks, and there are 1: start 2" in alone.refused


# What only processes have that have imported more.

STREAMED_HF = {"stream": True, "max_steps": 4, "save_every": 0}
FRAMEWORKS = {
    "hf alike": Told("hugging_face"),
    "hf micro": Told("hugging_face", {"micro": [3, 6]}),
    "hf fixed": Told("hugging_face", {"fixed": [True, False]}),
    "hf seed": Told("hugging_face", {"seed": [3, 4]}),
    "hf length": Told("hugging_face", {"length": [40, 36]}),
    "hf max_steps": Told("hugging_face", {"max_steps": [2, 3]}),
    "hf save_every": Told("hugging_face", {"save_every": [1, 2]}),
    "hf rate": Told("hugging_face", {"rate": [1e-3, 2e-3]}),
    "hf held out": Told("hugging_face", {"held_out": [40, 16]}),
    "hf held out alike": Told("hugging_face", {"held_out": 33}),
    "hf held out, later": Told("hugging_face", {"held_out": [40, 16], "evaluate_every": 1}),
    "hf held out, its own": Told(
        "hugging_face", {"held_out": 40, "evaluate_every": 1, "evaluates": "other data", "own_held_out": [40, 16]}
    ),
    "hf held out, rank 0 alone": Told("hugging_face", {"held_out": 33, "evaluate_every": 1, "evaluates": "alone"}),
    "hf fixed at first": Told("hugging_face", {"fixed": True}),
    "hf another size": Told("hugging_face", {"fixed": True, "micro": 4, "max_steps": 4}, after="hf fixed at first"),
    "hf streamed": Told("hugging_face", {**STREAMED_HF, "length": [40, 30]}),
    "hf streamed, saved": Told("hugging_face", {**STREAMED_HF, "length": [40, 30], "save_every": 2}),
    "hf streamed alike": Told("hugging_face", STREAMED_HF),
    "prepared": Told("accelerated", {"max_steps": 2}),
    "prepared again": Told("accelerated", after="prepared"),
    "prepared, stateful": Told("accelerated", {"stateful": True, "max_steps": 3}),
    "prepared, stateful again": Told("accelerated", {"stateful": True, "lose": 3}, after="prepared, stateful"),
}
UNLIKE_HF = {
    "hf micro": "per_device_train_batch_size is 3 on rank 0, 6 on rank 1",
    "hf fixed": "fixed_micro_batch is True on rank 0, False on rank 1",
    "hf seed": "seed is 3 on rank 0, 4 on rank 1",
    "hf length": "length of the data set is 40 on rank 0, 36 on rank 1",
    "hf max_steps": "max_steps is 2 on rank 0, 3 on rank 1",
    "hf save_every": "save_steps is 1 on rank 0, 2 on rank 1",
    "hf rate": "learning_rate is 0.001 on rank 0, 0.002 on rank 1",
    "hf held out, later": "the ranks do not evaluate alike: length of the data set is 40 on rank 0, 16 on rank 1",
    "hf held out": "the ranks do not evaluate alike: length of the data set is 40 on rank 0, 16 on rank 1",
}


@pytest.fixture(scope="module")
def frameworks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Came]:
    return come_once(tmp_path_factory, "frameworks", FRAMEWORKS, preloaded=HF)


@brings(
    "a rank of a Hugging Face `Trainer`, or of ms-swift, with other arguments: `per_device_train_batch_size`, "
    "`fixed_micro_batch`, seeds, steps, cadences of saves, evaluations and logs, learning rate; or another data set",
    Comes.REFUSED,
    "the ranks would train other samples, wait for each other for ever, or have other weights",
    "give all ranks the same",
)
@pytest.mark.parametrize("name", list(UNLIKE_HF))
def test_trainers_that_were_told_different_things(frameworks: dict[str, Came], name: str) -> None:
    """As in a loop of our own, before the model is put anywhere."""
    assert UNLIKE_HF[name] in frameworks[name].refused


def test_trainers_that_were_told_the_same_train_and_go_on_in_their_cut(frameworks: dict[str, Came]) -> None:
    """The arguments' enumerations and numbers are nothing that could be falsely refused."""
    assert [len(rank["steps"]) for rank in frameworks["hf alike"].ranks] == [2, 2], frameworks["hf alike"]
    assert {rank["refused"] for rank in frameworks["hf alike"].ranks} == {""}
    for name in ("hf held out alike", "hf held out, rank 0 alone"):
        assert [(rank["refused"], len(rank["steps"])) for rank in frameworks[name].ranks] == [("", 2)] * 2


@pytest.mark.parametrize(("name", "saved"), [("hf streamed", []), ("hf streamed, saved", [2])])
def test_a_stream_of_a_trainer_that_ends_sooner_on_one_rank(
    frameworks: dict[str, Came], name: str, saved: list[int]
) -> None:
    """Where nothing was saved such a run finished, too."""
    (line,) = {rank["refused"] for rank in frameworks[name].ranks}
    assert "data_epoch=1 samples=0 on rank 0, data_epoch=1 samples=12 on rank 1" in line, line
    assert [len(rank["steps"]) for rank in frameworks[name].ranks] == [4, 4]
    assert [one.step for one in frameworks[name].sealed()] == saved
    assert [(rank["refused"], len(rank["steps"])) for rank in frameworks["hf streamed alike"].ranks] == [("", 4)] * 2


def test_what_a_trainer_had_trained_before_ranks_evaluate_other_data_is_saved(frameworks: dict[str, Came]) -> None:
    """Loaders of a script's own are known at the evaluation. The steps since the last save were lost."""
    came = frameworks["hf held out, its own"]
    (line,) = {rank["refused"] for rank in came.ranks}
    assert line.startswith("Unlike: the ranks do not evaluate alike: length of the data set is 40 on rank 0, 16 on")
    assert [len(rank["steps"]) for rank in came.ranks] == [1, 1]
    assert [one.step for one in came.sealed()] == [1]
    assert {rank["refused"] for rank in frameworks["hf held out alike"].ranks} == {""}
    assert "size of fixed micro-batches: was 3 and is 4" in frameworks["hf another size"].refused


@brings(
    "the `DataLoader` that Accelerate prepares, when a run resumes, also with `use_stateful_dataloader`",
    Comes.REFUSED,
    "it begins anew; what Accelerate saves of a stateful one counts batches and leaves a random order out. (Its global "
    "batch grows with the number of ranks, too)",
    "`Batches`, or torchdata's `StatefulDataLoader` as it is, not prepared",
)
def test_accelerates_loaders_do_not_replay(frameworks: dict[str, Came]) -> None:
    """Said at the first start; refused where a run resumes, because the next batch is another one."""
    assert len(frameworks["prepared"].steps) == 2
    assert "cannot be resumed" in frameworks["prepared"].ranks[0]["warnings"][0]
    assert "DataLoaderShard begins where it always begins" in frameworks["prepared again"].refused
    assert len(frameworks["prepared, stateful"].steps) == 3
    assert re.search(
        "DataLoaderShard (goes on with another batch than was next|begins where it always begins)",
        frameworks["prepared, stateful again"].refused,
    )


STOPS = """
import os, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from dalsegno.elastic import session
from dalsegno.swift_plugin.hf.options import Options
from dalsegno.swift_plugin.hf.trainer import elastic_class

class Stops(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2 and sys.argv[3] == "step":
            self.stop(control)

    def on_epoch_end(self, args, state, control, **kwargs):
        if sys.argv[3] == "epoch":
            self.stop(control)

    def stop(self, control):
        if session().rank in (0, int(sys.argv[2])):
            control.should_training_stop = True

session(sys.argv[1])
sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, use_cache=False))
args = TrainingArguments(
    sys.argv[1] + "/out", per_device_train_batch_size=3, max_steps=6, save_strategy="no", report_to="none",
    disable_tqdm=True, use_cpu=True,
)
rows = [{"input_ids": torch.tensor([n % 16] * 4), "labels": torch.tensor([n % 16] * 4)} for n in range(40)]
trainer = Trainer(model=model, args=args, train_dataset=rows)
trainer.__class__ = elastic_class(Trainer)
if sys.argv[3] == "step":
    trainer.add_callback(Stops())
trainer.become_elastic(Options(12, False))
if sys.argv[3] == "epoch":
    trainer.add_callback(Stops())
trainer.train()
print("ended behind step", trainer.state.global_step)
"""


@brings(
    "a callback of a Hugging Face `Trainer` that sets `should_training_stop` on one rank",
    Comes.REFUSED,
    "the others would wait in a step that it does not make, or be aborted in it",
    "let it depend on something that the ranks have alike, such as `s.sum(…)` of what one of them has found",
)
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(("when", "step"), [("step", 2), ("epoch", 4)])
def test_one_rank_of_a_trainer_that_stops(tmp_path: Path, when: str, step: int, alone: bool) -> None:
    """As a loop of one's own that one rank leaves; what all ranks decide ends the training.

    At the epoch's end it is a callback that comes behind ours, which has asked no rank by then.
    """
    script = tmp_path / "train.py"
    script.write_text(STOPS)
    given = [str(script), str(tmp_path), "0" if alone else "1", when]
    ended = run_world(2, given, preloaded=HF, seconds=60)
    if not alone:
        assert [code for code, _ in ended] == [0, 0], "\n".join(output for _, output in ended)
        assert all(f"ended behind step {step}" in output for _, output in ended)
        return
    line = f"rank 0 has finished the training behind step {step}, and rank 1 goes on with step {step + 1}"
    assert any(f"Refusal: {line}" in output for _, output in ended), "\n".join(output for _, output in ended)
    assert ended[1][0] == 1


ASKS = """
import os, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from dalsegno.elastic import session
from dalsegno.elastic.rank import remarks
from dalsegno.swift_plugin import hf
from dalsegno.swift_plugin.hf import run
from dalsegno.swift_plugin.hf.options import Options
from dalsegno.swift_plugin.hf.trainer import elastic_class

asks, saves, out = sys.argv[1:4]

class Asks(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2 and session().rank == 0:
            setattr(control, asks, True)

sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, use_cache=False))
args = TrainingArguments(
    out + "/out", per_device_train_batch_size=3, max_steps=6, save_strategy=saves, save_steps=1, report_to="none",
    disable_tqdm=True, use_cpu=True,
)
rows = [{"input_ids": torch.tensor([n % 16] * 4), "labels": torch.tensor([n % 16] * 4)} for n in range(40)]
trainer = Trainer(model=model, args=args, train_dataset=rows, callbacks=[Asks()])
if hf.under_dlrover_run():
    hf.elastic(trainer, global_batch_size=12, memory_every=1)
else:
    run.LATE_SECONDS, remarks.remark = 1.0, lambda line: (print(line, flush=True), os._exit(7))
    session(out)
    trainer.__class__ = elastic_class(Trainer)
    trainer.become_elastic(Options(12, False))
trainer.train()
"""
IN_MEMORY = ("--nnodes=1", "--nproc-per-node=2", "--job-id=job", "--memory-replicas=1", "--max-restarts=0")


@brings(
    "a callback of a Hugging Face `Trainer` that sets `should_training_stop` on one rank, or `should_save`, with "
    "memory checkpoints, where one is due",
    Comes.REFUSED,
    "the others would wait in a save that it does not come to, or it for them",
    "as above",
)
@pytest.mark.executed
@pytest.mark.parametrize(
    ("asks", "saves", "line"),
    [
        (
            "should_training_stop",
            "no",
            r"ends the training \(should_training_stop\) is True on rank 0, False on rank 1",
        ),
        ("should_training_stop", "steps", r"ends the training \(should_training_stop\) is True on rank 0, False on"),
        ("should_save", "no", r"whether one saves it \(should_save\) is True on rank 0, False on rank 1"),
    ],
)
def test_one_rank_of_a_trainer_that_stops_or_saves_where_memory_is_due(
    shell: Shell, asks: str, saves: str, line: str
) -> None:
    """It skipped the save in memory, or went to another one, and the others waited, or failed at what they got."""
    pytest.importorskip("transformers")
    script = shell.directory / "asks.py"
    script.write_text(ASKS)
    ended = shell.run(*IN_MEMORY, "--checkpoint-dir=ck", str(script), asks, saves, str(shell.directory))
    assert ended.code == 1
    (said,) = [one for one in ended.said if "the training was refused: " in one]
    assert re.search(line, said), said


def test_a_rank_of_a_trainer_that_saves_alone_says_so(tmp_path: Path) -> None:
    """The others are in their next step, where nobody can tell them."""
    script = tmp_path / "asks.py"
    script.write_text(ASKS)
    ended = run_world(2, [str(script), "should_save", "no", str(tmp_path)], preloaded=HF, seconds=90)
    assert ended[0][0] == 7, "\n".join(output for _, output in ended)
    assert "rank 0 has waited 1 s for the others to save step 2: if a callback sets should_save, it" in ended[0][1]
    assert "has waited" not in ended[1][1]


def test_a_rank_that_ends_early_is_named_by_the_others(tmp_path: Path) -> None:
    """Nobody waits for a rank that another line of its script has ended, and the others say where to look."""
    script = tmp_path / "train.py"
    script.write_text(
        "from dalsegno.elastic import session\n"
        "s = session()\n"
        "if s.rank == 1:\n"
        "    raise SystemExit('my own mistake')\n"
        "for batch in s.steps([1, 2]):\n"
        "    print('trained')\n"
    )
    ended = run_world(2, [str(script)])
    assert [code for code, _ in ended] == [1, 1]
    assert (
        "PeerLost: another rank ended before it came to compare what the ranks were given; its own output says why"
        in ended[0][1]
    )
    assert "my own mistake" in ended[1][1]
    assert "trained" not in ended[0][1]
