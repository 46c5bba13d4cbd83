"""What engines, optimizers and wrappers make of a change of the world: right, said, or refused before the first step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dalsegno.elastic.universal import convert
from tests.support import engines_worker
from tests.support.mistakes import Comes, brings
from tests.support.zero_runs import run_world, seal_sharded

pytestmark = pytest.mark.timeout(300)

STEPS, MORE = 3, 3


def run(world: int, cases: list[dict[str, Any]], out: Path) -> list[list[dict[str, Any]]]:
    """The results of each case, of all ranks."""
    out.mkdir(exist_ok=True)
    done = run_world(world, [engines_worker.__file__, json.dumps(cases), str(out)], seconds=60 + 5 * len(cases))
    assert not any(code for code, _ in done), "\n".join(output for _, output in done)
    ranks = [json.loads((out / f"result-{rank}.json").read_text()) for rank in range(world)]
    return [list(each) for each in zip(*ranks, strict=True)]


ELEMENTWISE = ["sgd", "plain-sgd", "adagrad", "adadelta", "adamax", "adamw", "amsgrad", "fused", "nadam", "radam"]
ELEMENTWISE += ["rmsprop", "rprop", "asgd"]


def test_zero(tmp_path: Path) -> None:
    names = [*ELEMENTWISE, "lion"]
    made = [
        {"do": "zero", "optimizer": name, "stage": stage, "steps": STEPS + MORE, "save_after": STEPS,
         "save": str(tmp_path / f"{name}-{stage}" / f"step-{STEPS}.e1.0")}
        for name in names for stage in (2, 3)
    ]
    for case in made:
        Path(case["save"]).parent.mkdir()
    before = [ranks[0] for ranks in run(2, made, tmp_path / "before")]
    again = []
    for case in made:
        source = Path(case["save"])
        seal_sharded(source, stage=case["stage"], world=2, step=STEPS)
        target = source.with_name(f"{source.name}.universal.1")
        convert(source, target)
        common = {"do": "zero", "optimizer": case["optimizer"], "first": STEPS, "steps": STEPS + MORE, "load": str(source), "may_fail": True}
        again.append({**common, "stage": case["stage"], "form": "sharded", "reshard": True})
        again.append({**common, "stage": case["stage"], "form": "universal", "universal": str(target)})
        again.append({**common, "stage": 5 - case["stage"], "form": "universal", "universal": str(target)})
    after = [ranks[0] for ranks in run(3, again, tmp_path / "after")]
    for case, result in zip(made, before): print(case["optimizer"], case["stage"], result["reshards"], result["said"])
    for case, result in zip(again, after):
        wanted = before[again.index(case) // 3]["losses"][STEPS:]
        print(case["optimizer"], case["stage"], case["form"], case.get("reshard"), result.get("error") or [abs(a-b)/b for a,b in zip(result["losses"], wanted)])
    assert 0
