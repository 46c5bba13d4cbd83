"""Rows of docs/bring-your-script.md that no other file has: each with the real library, a join, a kill and a leave.

`tests/support/pages/rows.py` says for each row of that page which test plays it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.jobs.cluster import HOOKED, Training, Undisturbed, change_worlds
from tests.support.pages.sources import ROOT
from tests.support.workers import tiny_swift

from .test_membership import Clusters, end
from .test_staying import a_third_comes_and_goes, two_of_three

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]
WORKERS = ROOT / "tests" / "support" / "workers"


@dataclass(frozen=True)
class Worker(Training):
    """A script that is no example, at the examples' pace. `cache`: where it puts what it fetches or makes."""

    cache: str = ""

    def words(self, *, hooked: bool) -> list[str]:
        # `hooked.py` looks among the examples; an absolute path is one, too.
        return [str(HOOKED), str(self.script)] if hooked else [str(self.script)]

    def environment(self, step_log: Path) -> dict[str, str]:
        return {"TRL_CACHE": self.cache, **tiny_swift.OFFLINE} if self.cache else {}


def test_fsdp2_with_torchs_distributed_checkpoint(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """A session and a `save=` of the script's own: its shards load in every world."""
    job = clusters(training=Worker(WORKERS / "dcp_worker.py", 100, 10), nnodes="1:3", universal="")
    change_worlds(job)
    job.assert_undisturbed(undisturbed)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_trainer_without_a_loop(clusters: Clusters, undisturbed: Undisturbed, strategy: str) -> None:
    """Its steps are told by a callback."""
    training = Worker(WORKERS / "loopless_worker.py", 100, 10, extra=(f"--strategy={strategy}",))
    job = clusters(training=training, nnodes="1:3", universal="")
    change_worlds(job)
    job.assert_undisturbed(undisturbed)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `model`, `sft.jsonl` of conversations and `dpo.jsonl` of answers to prefer and not."""
    directory = tmp_path_factory.mktemp("trl")
    tiny_swift.make_model(directory / "model")
    tiny_swift.make_data(directory / "sft.jsonl", 152)
    lines = tiny_swift.make_data(directory / "pairs.jsonl", 152, pairs=True).read_text().splitlines()
    pairs = [as_trl_has_it(json.loads(line)) for line in lines]
    (directory / "dpo.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return directory


def as_trl_has_it(line: dict[str, object]) -> dict[str, object]:
    """A preference of ms-swift's as one of trl's."""
    asked, answered = line["messages"]  # type: ignore[misc]
    worse = {"role": "assistant", "content": line["rejected_response"]}
    return {"prompt": [asked], "chosen": [answered], "rejected": [worse]}


def trl(made: Path, kind: str, *more: str) -> Worker:
    """Data epochs of 10 steps, the last of which is short: 152 samples, 16 at a time."""
    flags = ("--max-micro-batch-size=3", f"--kind={kind}", f"--made={made}", *more)
    return Worker(
        *(WORKERS / "trl_worker.py", 60, 10),
        extra=flags,
        needs_agent=True,
        preloaded="tests.support.forks.preloaded_hf",
        cache=str(made / "cache"),
    )


@pytest.mark.parametrize("kind", ["sft", "dpo", "reward"])
def test_trls_trainers(clusters: Clusters, undisturbed: Undisturbed, made: Path, kind: str) -> None:
    """Their worlds change, and their curves are the same."""
    job = clusters(training=trl(made, kind), nnodes="1:3", universal="")
    change_worlds(job)
    job.assert_undisturbed(undisturbed)


@pytest.mark.parametrize("kind", ["sft", "dpo", "reward"])
def test_trls_trainers_stay(clusters: Clusters, undisturbed: Undisturbed, made: Path, kind: str) -> None:
    """Their ranks meet before they train, because rank 0 reads the data first: new ones meet who has stayed there."""
    job, first = two_of_three(clusters, training=trl(made, kind, "--stay"), universal="")
    a_third_comes_and_goes(job, first)
    end(job, undisturbed)
