"""What a script trains with beside what it has told the session: said, or refused, with real ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.pages.mistakes import Comes, brings
from tests.support.workers.zero_runs import run_world

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

WORKER = Path(__file__).parents[1] / "support" / "workers" / "unseen_worker.py"
RATES = [0.1 * 0.5**step for step in range(1, 5)]


def run(directory: Path, world: int, case: str, steps: int = 2, *, fails: bool = False) -> list[str]:
    """What each rank printed; all of them end well, or none."""
    ended = run_world(world, [str(WORKER), case, str(steps), str(directory)])
    assert all((code != 0) is fails for code, _ in ended), "\n".join(output for _, output in ended)
    return [output for _, output in ended]


def rates(output: str) -> list[float]:
    return [float(rate) for rate in re.findall(r"^step \d+ rate (\S+)$", output, re.MULTILINE)]


@brings(
    "with DeepSpeed, a scheduler that the script steps by hand and gave neither to `deepspeed.initialize` nor to "
    "`s.engine`, when a run resumes",
    Comes.SAID,
    "it begins anew, and sets the learning rate of the first steps. Said at the start, and again if it stands "
    "elsewhere than the engine",
    "`deepspeed.initialize(..., lr_scheduler=scheduler)`, whose engine steps it; or `s.engine(engine, "
    "schedule=scheduler)`; or set it by `s.step` yourself",
)
def test_a_schedule_beside_an_engine(tmp_path: Path) -> None:
    """One that is given, in either way, or moved by the script goes on."""
    left = tmp_path / "left"
    assert "not saved: StepLR: it was given neither to" in run(left, 2, "schedule")[0]
    (again,) = run(left, 1, "schedule", 4)
    assert again.count("StepLR sets the learning rate of the engine's optimizer and was given neither to") == 1
    for case in ("schedule, given", "schedule, initialize", "schedule, moved"):
        directory = tmp_path / case
        began = run(directory, 2, case)[0]
        assert "not saved: StepLR" not in began or case == "schedule, moved"
        (again,) = run(directory, 1, case, 4)
        assert [*rates(began), *rates(again)] == pytest.approx(RATES)
        assert "StepLR sets the learning rate" not in again


@brings(
    "a scheduler in a loop with a `save=` of your own (FSDP2 and DCP) that was not loaded where the run goes on",
    Comes.SAID,
    "it begins anew there. What such a function writes nobody knows, so nothing is said at a run's start, and nothing "
    "refused",
    "write the scheduler's `state_dict()`, and load it where the run goes on ([how](dcp.md))",
)
def test_a_schedule_in_a_loop_of_ones_own(tmp_path: Path) -> None:
    """Said on rank 0, where the run resumes; not of one that is saved."""
    for case, times in (("loop's schedule", 1), ("loop's schedule, saved", 0), ("loop", 0)):
        for world, steps, said in ((2, 2, 0), (1, 4, times)):
            outputs = run(tmp_path / case, world, case, steps)
            assert [one.count("StepLR sets the learning rate of SGD") for one in outputs] == [said, 0][:world]


@brings(
    "tensor parallelism (`parallelize_module`) in a script of your own, with a plan that deals each rank samples of "
    "its own, or with an `Evaluator`",
    Comes.REFUSED,
    "the ranks of a group compute each sample together: of other samples the result is wrong from the first step",
    "cut batches for the groups: `BatchPlan(G, mesh['dp'].size(), m)` and `mesh['dp'].get_local_rank()`; evaluate in a "
    "loop of your own ([how](dcp.md))",
)
def test_tensor_parallelism(tmp_path: Path) -> None:
    """Alone and beneath FSDP. Dealt to the groups it goes on in a world without any, to the same weights."""
    for case, world in (("tensor", 2), ("tensor", 4), ("tensor, crosswise", 4)):
        for output in run(tmp_path / f"{case}-{world}", world, case, fails=True):
            assert re.search(r"Refusal: tensor parallelism: 0\.weight.* over ranks \d, \d, which compute", output)
            assert "mesh['dp'].get_local_rank()" in output
            assert not rates(output)
    for output in run(tmp_path / "evaluated", 4, "tensor, dealt, evaluated", fails=True):
        assert re.search(r"Refusal: tensor parallelism: 0\.weight.* over ranks .* the Evaluator deals each of", output)
        assert not rates(output)
    ends = {
        worlds: [run(tmp_path / str(worlds), world, case, steps)[0] for world, case, steps in worlds][-1]
        for worlds in (
            ((1, "loop", 4),),
            ((2, "tensor, dealt", 2), (1, "loop", 4)),
            ((4, "tensor, dealt", 2), (2, "tensor, dealt", 4)),
        )
    }
    weights = [float(output.rpartition("weights ")[2].split()[0]) for output in ends.values()]
    assert weights == pytest.approx(weights[:1] * 3, abs=2e-5)


@brings(
    "a second DeepSpeed engine that steps, beside the one of `s.engine` (an actor and a critic)",
    Comes.SAID,
    "`s.engine` saves one engine; the other one's weights and optimizer begin anew at each start. (As a part of "
    "`s.engine` it is refused: its `state_dict()` has no optimizer)",
    "one module of both models, and one engine of that",
)
def test_a_second_engine(tmp_path: Path) -> None:
    """Once, on rank 0; not of one that only computes."""
    line = "a second DeepSpeed engine, of a Sequential, steps with AdamW and is in no checkpoint"
    for case, times in (("critic", 1), ("critic, frozen", 0)):
        outputs = run(tmp_path / case, 2, case)
        assert [one.count(line) for one in outputs] == [times, 0], outputs[0]
    for output in run(tmp_path / "given", 2, "critic, given", fails=True):
        assert "s.engine(critic=...): a DeepSpeed engine is no part" in output


@brings(
    "DeepSpeed in fp16 with a dynamic loss scale (the default), at another number of ranks",
    Comes.SAID,
    "a gradient of one rank's samples overflows before it is averaged, and the whole step is then left out: which "
    "steps depends on how samples are dealt. (The scale itself is saved, and goes on.)",
    "bf16; or a fixed `loss_scale` that is small enough",
)
def test_a_dynamic_loss_scale(tmp_path: Path) -> None:
    """Said at the start of a run of several ranks."""
    line = "the same only in distribution: fp16 with a dynamic loss scale"
    for case, world, times in (("fp16", 2, 1), ("fp16, fixed", 2, 0), ("fp16", 1, 0), ("bare", 2, 0)):
        assert run(tmp_path / f"{case}-{world}", world, case)[0].count(line) == times
