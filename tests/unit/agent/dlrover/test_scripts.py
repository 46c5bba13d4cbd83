"""What a script's text says of its use of DLRover's library."""

from __future__ import annotations

import pytest

from dalsegno.agent.dlrover.scripts import findings, outdated, refusal, uses, warnings

DDP = """
from dlrover.trainer.torch.elastic.sampler import ElasticDistributedSampler
from dlrover.trainer.torch.elastic.trainer import ElasticTrainer
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer
checkpointer = DdpCheckpointer("/ckpt", replica_count=1)
with ElasticTrainer(model).step(fix_total_batch_size=True):
    pass
"""
SHARDS = "from dlrover.python.elastic_agent.sharding.client import ShardingClient\nclient = ShardingClient('x')\n"


def test_what_is_used_is_found() -> None:
    """Classes by name, and what they are asked for."""
    found = uses(DDP)
    assert found.imports
    assert found.trainer
    assert found.fixes_batch
    assert found.sampler
    assert found.replicas
    assert found.checkpointers == ("DdpCheckpointer",)
    assert not found.loader
    assert not found.of_the_master


def test_a_script_of_others_uses_nothing() -> None:
    """Names in comments, and other people's classes of the same name, do not count."""
    assert not uses("import torch\n# from dlrover import x\nclass ElasticTrainer: pass\n").imports


def test_a_script_that_needs_dlrovers_master_is_refused() -> None:
    """One line says what it uses and what to use instead."""
    line = refusal("train.py", uses(SHARDS))
    assert "train.py uses ShardingClient" in line
    assert "ElasticDistributedSampler" in line
    assert refusal("train.py", uses(DDP)) == ""
    assert "refused" in " ".join(findings("train.py", uses(SHARDS), "0.6.1"))


def test_a_comment_on_the_master_is_no_use() -> None:
    """What is commented out is not refused."""
    assert refusal("train.py", uses(DDP + "# ShardingClient was here\n")) == ""


def test_defects_are_named_where_they_are_met() -> None:
    """Uneven accumulation only for worlds that may open; the sampler's replay always."""
    lines = warnings(uses(DDP), 1, 4, 1)
    assert len(lines) == 2
    assert "with 3 of 4 nodes" in lines[0]
    assert "repeats samples" in lines[1]
    assert len(warnings(uses(DDP), 2, 4, 2)) == 1
    assert len(warnings(uses(DDP.replace("=True", "=False")), 1, 4, 1)) == 1


def test_findings_say_what_will_happen() -> None:
    """The library's version, and what becomes of a checkpoint in memory."""
    lines = findings("train.py", uses(DDP), "0.6.1")
    assert lines[0].startswith("dlrover 0.6.1 is installed")
    assert any("a crash resumes from there" in line for line in lines)
    assert findings("train.py", uses(DDP), "")[0] == "dlrover is not installed here"
    assert "does not import dlrover" in findings("train.py", uses("import torch"), "0.6.1")[0]


@pytest.mark.parametrize(
    ("deepspeed", "torch", "loads_all", "says"),
    [
        ("0.19.8", "2.13.0+cpu", True, "fails with DeepSpeed 0.19.8 at its first save"),
        ("0.17.2", "2.5.1", True, "fails with DeepSpeed 0.17.2 at its first save"),
        ("0.17.1", "2.5.1", True, "when it loads from memory"),
        ("0.16.4+cu121", "2.5.1", True, "when it loads from memory"),
        ("0.15.4", "2.13.0+cpu", False, "set it"),
        ("0.15.4", "2.13.0+cpu", True, ""),
        ("0.16.3.post1", "2.5.1", False, ""),
        ("", "2.13.0", False, ""),
    ],
)
def test_a_deepspeed_that_its_class_does_not_fit(deepspeed: str, torch: str, loads_all: bool, says: str) -> None:
    """Nobody trains up to the first save to learn that. Other classes do not care."""
    text = "from dlrover.trainer.torch.flash_checkpoint.deepspeed import DeepSpeedCheckpointer\n"
    lines = outdated(uses(text), deepspeed, torch, loads_all)
    assert [says in line for line in lines] == ([True] if says else [])
    assert outdated(uses(text.replace("DeepSpeed", "Ddp")), deepspeed, torch, loads_all) == []
