"""Runs one of the examples at a pace that a test controls: `dlrover-run ... hooked.py ddp.py --steps 100`.

Steps of the second half are slow until the file `hurry` appears in DALSEGNO_TEST_HOLDS, so that a run does not end
before what is to happen to it has happened, however busy the machine is. In the environment of an agent:

    DALSEGNO_TEST_HOLDS     a directory of the test's
    DALSEGNO_TEST_HOLD      where its workers are held, with commas: `start` (before the example runs), `saved-N` (this
                            rank's part of the save of step N is written, the checkpoint not yet sealed), `end` (the
                            training finished and said so, the process not yet gone). `<place>-<node>-<epoch>` appears
                            in the directory when a worker is held; it goes on when `release` appears. With saves in the
                            background there is `writing-N` instead of `saved-N`: this rank's part is being written
    DALSEGNO_TEST_STEPS     so many steps of the second half each epoch makes at once; the next one lasts until the
                            world is about to change or until `hurry`: the run does not end before, however slowly nodes
                            come. Then `standing-<epoch>-<rank>-of-<ranks>` appears
    DALSEGNO_TEST_STANDS    where that long step stands still: `behind` the optimizer's step (as it is said nowhere), or
                            `before` it, with the gradients of all ranks, or with those of this rank alone: `backward`;
                            in an `evaluation` by a Trainer of transformers, of which each batch counts as a step
    DALSEGNO_TEST_LEAVES    the loop is left right behind the save of this step, and the session finished
    DALSEGNO_TEST_SYNC      seconds that the disk takes to sync the model's file; `<file>=<seconds>` for another one.
                            Until `hurry`
    DALSEGNO_TEST_BEST      the step that is the best one by a tracked metric; until it, no other one is any good
    DALSEGNO_TEST_BACKGROUND  save in the background, on every rank 300,000 bytes more
    DALSEGNO_TEST_ARGUMENTS  what its TrainingArguments get besides, in JSON
    DALSEGNO_TEST_KEEPS     something keeps the model that its Trainer of transformers computes with
    DALSEGNO_TEST_JOINS     it makes the default process group first of all; "file": by an init_method of its own;
                            "subgroup": and another one, which it destroys; "behind", "sum": its ranks meet, or sum
                            something, behind s.state(...) instead
    DALSEGNO_TEST_TALKS     its ranks meet at a barrier once its TrainingArguments are made; "sum": and sum something
    DALSEGNO_TEST_STRANGE   its DeepSpeed turns out to be one that ours cannot load other ranks' shards into
    DALSEGNO_TEST_LOADERS   read the data in two DataLoader processes, started so: fork, spawn or forkserver
    DALSEGNO_TEST_LAST_WORDS  printed when the example ends, however it ends
    DALSEGNO_TEST_HABITS    what tutorials do: a MASTER_ADDR and MASTER_PORT of the script's own; and a thread that is
                            no daemon and goes on until `hurry`
    DALSEGNO_TEST_CHILDREN  start two DataLoader workers and a grandchild in a session of its own first
"""

from __future__ import annotations

import itertools
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from dalsegno.elastic import Batches, Session, background, session
from dalsegno.elastic.saving.background_save import Background
from dalsegno.elastic.saving.declared import how_loaded

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
HOLD_LIMIT = 180.0
# Seconds of a step, from this part of the run on.
SLOW_STEPS = ((0.9, 10.0), (0.75, 2.0), (0.5, 1.0), (0.0, 0.0))
LOOK_EVERY = 0.02
# Steps that each epoch has made in the second half, in this process.
LATE_STEPS: dict[int, Iterator[int]] = {}


def hold(place: str) -> None:
    """Waits here if this process is to be held at this place."""
    if place not in os.environ.get("DALSEGNO_TEST_HOLD", "").split(","):
        return
    directory = Path(os.environ["DALSEGNO_TEST_HOLDS"])
    (directory / f"{place}-{os.environ['DALSEGNO_NODE']}-{os.environ['DALSEGNO_EPOCH']}").touch()
    deadline = time.monotonic() + HOLD_LIMIT
    while not (directory / "release").exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"held at {place} for {HOLD_LIMIT:.0f} s")
        time.sleep(LOOK_EVERY)


def in_a_hurry() -> bool:
    """Nothing more is to happen to the run."""
    return (Path(os.environ["DALSEGNO_TEST_HOLDS"]) / "hurry").exists()


def wait_for_the_test(steps: int) -> None:
    """Makes the present step of so many long, if it is in the run's second half."""
    free = int(os.environ.get("DALSEGNO_TEST_STEPS", 0))
    if free:
        late = LATE_STEPS.setdefault(session().epoch, itertools.count())
        slow = HOLD_LIMIT if session().step >= steps // 2 and next(late) >= free else 0.0
    else:
        slow = next(seconds for part, seconds in SLOW_STEPS if session().step >= part * steps)
    deadline = time.monotonic() + slow
    if free and slow:
        here = session()
        name = f"standing-{here.epoch}-{here.rank}-of-{here.world_size}"
        (Path(os.environ["DALSEGNO_TEST_HOLDS"]) / name).touch()
    while time.monotonic() < deadline and not in_a_hurry() and not session().should_drain:
        if free:
            session().busy()  # It is no stall.
        time.sleep(LOOK_EVERY)


def slow_down(steps: int) -> None:
    """Lets steps of the second half last long, unless the test is in a hurry or the world is about to change."""
    import common  # The example's own, from its directory.

    plain, stands = common.StepClock.wait, os.environ.get("DALSEGNO_TEST_STANDS", "behind")

    def wait(self: Any) -> None:
        if not in_a_hurry():
            plain(self)
            if stands == "behind":
                wait_for_the_test(steps)

    common.StepClock.wait = wait
    if stands == "before":
        # The second is what a Trainer of transformers calls.
        for module, name in ((common, "gradient_norm"), (torch.nn.utils, "clip_grad_norm_")):
            norm = getattr(module, name)

            def wait_before(*arguments: Any, norm: Any = norm, **options: Any) -> Any:
                wait_for_the_test(steps)
                return norm(*arguments, **options)

            setattr(module, name, wait_before)
    if stands == "evaluation":
        from transformers import Trainer

        predict = Trainer.prediction_step

        def wait_to_predict(self: Any, *arguments: Any, **options: Any) -> Any:
            wait_for_the_test(steps)
            return predict(self, *arguments, **options)

        Trainer.prediction_step = wait_to_predict
    if stands == "backward":
        backward = torch.Tensor.backward

        def wait_for_others(self: Any, *arguments: Any, **options: Any) -> None:
            wait_for_the_test(steps)
            backward(self, *arguments, **options)

        torch.Tensor.backward = wait_for_others  # type: ignore[method-assign]


def hold_saves() -> None:
    """Puts the place `saved-N` behind the script's own writing."""
    plain = Session.save

    def save(self: Session, write: Any, **options: Any) -> Any:
        if isinstance(write, Background):
            return plain(self, write, **options)

        def write_and_hold(path: Path) -> None:
            write(path)
            hold(f"saved-{self.step}")

        vars(write_and_hold).update(how_loaded(write))
        return plain(self, write_and_hold, **options)

    Session.save = save  # type: ignore[method-assign]


def leave_behind(step: int) -> None:
    """As a script does that finds its loss good enough as the next step begins."""
    plain = Session.steps

    def steps(self: Session, *arguments: Any, **options: Any) -> Iterator[Any]:
        for batch in plain(self, *arguments, **options):
            if batch.step > step:
                self.finish()
                return
            yield batch

    Session.steps = steps  # type: ignore[method-assign]


class Held:
    """Is pickled as 0, once this process is not held at a place any more."""

    def __init__(self, place: str) -> None:
        self.place = place

    def __deepcopy__(self, memo: object) -> Held:
        return self

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        hold(self.place)
        return int, (0,)


def save_in_background() -> None:
    """Has what the example writes written in the background instead, behind the place `writing-N`."""
    plain = Session.save

    def save(self: Session, write: Any, **options: Any) -> Any:
        def state() -> dict[str, Any]:
            with tempfile.TemporaryDirectory() as made:
                write(Path(made))
                files: dict[str, Any] = {path.name: path.read_bytes() for path in Path(made).iterdir()}
            return {
                f"held-{self.rank}.pt": Held(f"writing-{self.step}"),
                f"more-{self.rank}.bin": bytes(300_000),
                **files,
            }

        return plain(self, background(state), **options)

    Session.save = save  # type: ignore[method-assign]


def measure(best: int) -> None:
    """Has a metric tracked, and measured with each save that is to come to the disk."""
    plain = Session.save

    def save(self: Session, write: Any, **options: Any) -> Any:
        self.track("score", mode="max")
        if options.get("make_durable") or not options.get("in_memory"):
            options["metric"] = float(self.step == best)
        return plain(self, write, **options)

    Session.save = save  # type: ignore[method-assign]


def sync_slowly(what: str) -> None:
    """The disk has the bytes of one of a checkpoint's files so many seconds after it was asked to."""
    name, _, seconds = what.rpartition("=")
    plain = os.fsync

    def fsync(descriptor: int) -> None:
        file = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
        # What is put in another file's place has a name of its own until then.
        if file == (name or "model.pt") or (name and file.startswith(f".{name}.")):
            deadline = time.monotonic() + float(seconds)
            while time.monotonic() < deadline and not in_a_hurry():
                time.sleep(LOOK_EVERY)
        plain(descriptor)

    os.fsync = fsync


def give(arguments: dict[str, Any]) -> None:
    """To a Trainer of transformers, in place of the example's."""
    from transformers import TrainingArguments

    plain = TrainingArguments.__init__

    def init(self: Any, *given: Any, **options: Any) -> None:
        plain(self, *given, **{**options, **arguments})

    TrainingArguments.__init__ = init


KEPT: list[Any] = []


def keep_the_model() -> None:
    """A loss function may keep what it is given."""
    from transformers import Trainer

    compute = Trainer.compute_loss

    def compute_and_keep(self: Any, model: Any, *arguments: Any, **options: Any) -> Any:
        KEPT[:] = [model]
        return compute(self, model, *arguments, **options)

    Trainer.compute_loss = compute_and_keep


def talk(how: str) -> None:
    """A barrier, as `main_process_first` has ranks meet at; or a sum over all ranks."""
    from transformers import TrainingArguments

    plain = TrainingArguments.__init__

    def init(self: Any, *given: Any, **options: Any) -> None:
        plain(self, *given, **options)
        with self.main_process_first():
            pass
        if how == "sum" and torch.distributed.is_initialized():
            torch.distributed.all_reduce(torch.ones(1))

    TrainingArguments.__init__ = init


def meet_behind_the_state(how: str) -> None:
    """Where several ranks do."""
    from dalsegno.elastic.script.session import Session

    plain = Session.state

    def state(self: Any, *given: Any, **options: Any) -> Any:
        found = plain(self, *given, **options)
        if how == "sum":
            self.sum(1.0)
        elif self.world_size > 1:
            torch.distributed.barrier()
        return found

    Session.state = state  # type: ignore[method-assign]


def join(how: str) -> None:
    """Makes the default process group, as the environment says or, if so wished, by a file."""
    if how in ("behind", "sum"):
        meet_behind_the_state(how)
        return
    given: dict[str, Any] = {}
    if how == "file":
        port, size, rank = (os.environ[name] for name in ("MASTER_PORT", "WORLD_SIZE", "RANK"))
        place = f"file://{Path.cwd()}/group-{port}-{size}"
        given = {"init_method": place, "world_size": int(size), "rank": int(rank)}
    torch.distributed.init_process_group("gloo", **given)
    if how == "subgroup":
        torch.distributed.destroy_process_group(torch.distributed.new_group())


def be_strange() -> None:
    """What a version of DeepSpeed that came after the save may be like: only loading finds out."""
    from dalsegno.elastic.deepspeed import checks, loading

    assert checks.whole_parameters is loading.whole_parameters
    loading.whole_parameters = lambda engine: False


def read_in_processes(context: str) -> None:
    """Has the example's batches read by DataLoader processes."""
    plain = Batches.__init__

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        loader = {"num_workers": 2, "multiprocessing_context": context}
        plain(self, *arguments, **{**options, "loader_options": loader})

    Batches.__init__ = init  # type: ignore[method-assign]


def start_children() -> Any:
    """Two DataLoader workers at work and a grandchild that left the process group; kept until this process ends."""
    data = torch.utils.data.TensorDataset(torch.zeros(1 << 20, 1))
    batches = iter(DataLoader(data, batch_size=1, num_workers=2, persistent_workers=True))
    next(batches)
    code = "import subprocess, sys; subprocess.run(['sleep', '600'], start_new_session=True)"
    return batches, subprocess.Popen([sys.executable, "-c", code], start_new_session=True)


def take_up_habits() -> None:
    def beat() -> None:
        while not in_a_hurry():
            time.sleep(LOOK_EVERY)

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="9")
    threading.Thread(target=beat, name="beat").start()


def main() -> None:
    example = EXAMPLES / sys.argv[1]
    sys.argv = [str(example), *sys.argv[2:]]
    sys.path.insert(0, str(EXAMPLES))
    kept = start_children() if os.environ.get("DALSEGNO_TEST_CHILDREN") else None
    slow_down(next(int(flag.partition("=")[2]) for flag in sys.argv if flag.startswith("--steps=")))
    save_in_background() if os.environ.get("DALSEGNO_TEST_BACKGROUND") else hold_saves()
    if os.environ.get("DALSEGNO_TEST_LEAVES"):
        leave_behind(int(os.environ["DALSEGNO_TEST_LEAVES"]))
    if os.environ.get("DALSEGNO_TEST_BEST"):
        measure(int(os.environ["DALSEGNO_TEST_BEST"]))
    if os.environ.get("DALSEGNO_TEST_LOADERS"):
        read_in_processes(os.environ["DALSEGNO_TEST_LOADERS"])
    if os.environ.get("DALSEGNO_TEST_ARGUMENTS"):
        give(json.loads(os.environ["DALSEGNO_TEST_ARGUMENTS"]))
    if os.environ.get("DALSEGNO_TEST_KEEPS"):
        keep_the_model()
    if os.environ.get("DALSEGNO_TEST_JOINS") and "RANK" in os.environ:
        join(os.environ["DALSEGNO_TEST_JOINS"])
    if os.environ.get("DALSEGNO_TEST_TALKS"):
        talk(os.environ["DALSEGNO_TEST_TALKS"])
    if os.environ.get("DALSEGNO_TEST_STRANGE"):
        be_strange()
    if os.environ.get("DALSEGNO_TEST_SYNC"):
        sync_slowly(os.environ["DALSEGNO_TEST_SYNC"])
    if os.environ.get("DALSEGNO_TEST_HABITS"):
        take_up_habits()
    hold("start")
    try:
        runpy.run_path(str(example), run_name="__main__")
    finally:
        if os.environ.get("DALSEGNO_TEST_LAST_WORDS"):
            print(os.environ["DALSEGNO_TEST_LAST_WORDS"], flush=True)
    hold("end")
    del kept


if __name__ == "__main__":
    main()
