"""What a script uses of DLRover's client library, by its text, and what will then happen here. Pure.

Their defects are named because their scripts run as they are, unless `--dlrover-fixes` mends them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = [
    "Uses",
    "findings",
    "fixed",
    "fixed_unread",
    "keeps_nothing",
    "outdated",
    "refusal",
    "refused_class",
    "uses",
    "warnings",
]

# Classes that ask DLRover's master for what they need, and what to use instead.
_SHARDING = "DLRover's ElasticDistributedSampler, or ElasticSampler of dalsegno.elastic, which need no master"
_NO_MASTER = "this master speaks another protocol: drop it"
_OF_THE_MASTER = {
    "ShardingClient": _SHARDING,
    "IndexShardingClient": _SHARDING,
    "MasterClient": _NO_MASTER,
    "build_master_client": _NO_MASTER,
}
_MODULES_OF_THE_MASTER = {
    "dlrover.trainer.tensorflow": "its TensorFlow estimators take their data from DLRover's master",
    "dlrover.trainer.worker": "its TensorFlow workers take their data from DLRover's master",
    "dlrover.python.unified": "its unified API runs on Ray under a master of its own",
}
_CHECKPOINTER = re.compile(r"\b(\w*Checkpointer|FlashCkptTrainer)\b")
# `with trainer.step(…)`, where other classes have a `step` without `with`.
_STEP = re.compile(r"\bwith\s+[\w.]+\.step\(")
_FIXED_STEP = re.compile(
    r"\bfix_total_batch_size\s*=\s*(?!False)\w|\bwith\s+[\w.]+\.step\(\s*(?!False|fix_total_batch_size)\w"
)
_LOADS = re.compile(r"\bload\w*\s*\(")
# Versions of DeepSpeed, from which its calls no longer fit that class; and of torch, with another default.
_SAVES_BEFORE, _LOADS_BEFORE, _LOADS_WEIGHTS_ONLY = (0, 17, 2), (0, 16, 4), (2, 6)
_IMPORT = re.compile(r"^[ \t]*(?:from|import)[ \t]+(dlrover[\w.]*)", re.MULTILINE)


@dataclass(frozen=True)
class Uses:
    """What a script's text names.

    Attributes:
        imports: it imports the library at all.
        trainer: `ElasticTrainer`.
        fixes_batch: it asks that class to keep the batch size.
        batch_of_its_own: it enters that class's step without asking for that.
        sampler: `ElasticDistributedSampler`.
        loader: `ElasticDataLoader`.
        checkpointers: classes of Flash Checkpoint.
        replicas: its checkpoints are copied to other nodes' memory.
        of_the_master: what it uses that talks to DLRover's master, with what to do instead.
    """

    imports: bool = False
    trainer: bool = False
    fixes_batch: bool = False
    batch_of_its_own: bool = False
    sampler: bool = False
    loader: bool = False
    checkpointers: tuple[str, ...] = ()
    replicas: bool = False
    of_the_master: tuple[tuple[str, str], ...] = ()


def uses(text: str) -> Uses:
    """Reads a script's text."""
    # Comments name what is not used.
    code = re.sub(r"#.*", "", text)
    modules = _IMPORT.findall(code)
    if not modules:
        return Uses()
    found = [(name, instead) for name, instead in _OF_THE_MASTER.items() if re.search(rf"\b{name}\b", code)]
    found += [
        (module, instead)
        for module in sorted(set(modules))
        for begins, instead in _MODULES_OF_THE_MASTER.items()
        if f"{module}.".startswith(f"{begins}.")
    ]
    fixes_batch = _FIXED_STEP.search(code) is not None
    return Uses(
        imports=True,
        trainer="ElasticTrainer" in code,
        fixes_batch=fixes_batch,
        batch_of_its_own=not fixes_batch and _STEP.search(code) is not None,
        sampler="ElasticDistributedSampler" in code,
        loader="ElasticDataLoader" in code,
        checkpointers=tuple(sorted(set(_CHECKPOINTER.findall(code)))) if "flash_checkpoint" in code else (),
        replicas=re.search(r"\breplica_count\s*=\s*[1-9a-z]", code) is not None,
        of_the_master=tuple(found),
    )


def keeps_nothing(text: str) -> bool:
    """Whether a script's steps are heard, and a restart loses all: no Flash Checkpoint, and nothing is loaded."""
    found = uses(text)
    return found.trainer and not found.checkpointers and not _LOADS.search(re.sub(r"#.*", "", text))


def refusal(script: str, found: Uses) -> str:
    """Why the script cannot run here, in one line; empty if it can."""
    if not found.of_the_master:
        return ""
    return f"{script} uses {_needs_master(*found.of_the_master[0])}"


def refused_class(name: str) -> str:
    """The same where a script makes an object of this class, although its text did not tell."""
    return f"the script uses {_needs_master(name, _OF_THE_MASTER[name])}"


def _needs_master(name: str, instead: str) -> str:
    return f"{name} of dlrover, which needs DLRover's master; there is none here. Instead: {instead}"


def warnings(found: Uses, min_nodes: int, max_nodes: int, node_unit: int) -> list[str]:
    """One line for each defect of the library that this script meets, said at the start.

    Args:
        min_nodes, max_nodes, node_unit: the worlds that may open.
    """
    lines = []
    sizes = [size for size in range(min_nodes, max_nodes + 1) if size % node_unit == 0]
    uneven = [size for size in sizes if max_nodes % size]
    if found.trainer and found.fixes_batch and uneven:
        several = len(uneven) > 1
        listed = ", ".join(str(size) for size in uneven)
        lines.append(
            f"dlrover's ElasticTrainer gives ranks different numbers of micro-batches with {listed} of {max_nodes}"
            f" nodes: the batch is not what it was, and ranks may wait for each other in vain; --nnodes and --node-unit"
            f" can exclude {'these sizes' if several else 'this size'}, --dlrover-fixes mends it"
        )
    if found.sampler:
        lines.append(
            "dlrover's ElasticDistributedSampler counts from the last resume: from the second resume in a data epoch on"
            " it repeats samples, unless the script adds what was completed before it; --dlrover-fixes mends it"
        )
    return lines


def outdated(found: Uses, deepspeed: str, torch: str, loads_all: bool) -> list[str]:
    """What `DeepSpeedCheckpointer` cannot do with the installed libraries, one line; empty if it works with them.

    Args:
        deepspeed, torch: their versions; empty: not installed.
        loads_all: torch is told to load as it did before 2.6.
    """
    if "DeepSpeedCheckpointer" not in found.checkpointers or not deepspeed:
        return []
    fails = f"dlrover's DeepSpeedCheckpointer fails with DeepSpeed {deepspeed}"
    if _numbers(deepspeed) >= _SAVES_BEFORE:
        return [f"{fails} at its first save; it works with DeepSpeed 0.15.4"]
    if _numbers(deepspeed) >= _LOADS_BEFORE:
        return [f"{fails} when it loads from memory, after a crash; it works with DeepSpeed 0.15.4"]
    if _numbers(torch) >= _LOADS_WEIGHTS_ONLY and not loads_all:
        return [f"DeepSpeed {deepspeed} loads with torch {torch} only under TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1: set it"]
    return []


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"^\d+|(?<=\.)\d+", version.partition("+")[0])[:3])


def fixed(found: Uses) -> list[str]:
    """What `--dlrover-fixes` does for this script, said at the start in place of the warnings."""
    if found.trainer and found.fixes_batch and not found.sampler:
        return [
            "--dlrover-fixes: the script cuts its batches without ElasticDistributedSampler, so a world that does not"
            " divide the largest one makes a larger global batch; all ranks make as many micro-batches"
        ]
    names = [name for name, here in (("ElasticTrainer", found.trainer), ("sampler", found.sampler)) if here]
    return [f"--dlrover-fixes: dlrover's {' and '.join(names)} with the order and plan of dalsegno"] if names else []


def fixed_unread(script: str) -> list[str]:
    """The same where there is no text of the script."""
    return [
        f"--dlrover-fixes: the text of {script} is not found here; its batches are taken to be the same in every world"
        " (fix_total_batch_size=True)"
    ]


def findings(script: str, found: Uses, version: str) -> list[str]:
    """What `dalsegno doctor --dlrover` says of a script, one line each.

    Args:
        version: of the installed library; empty: there is none.
    """
    if not found.imports:
        return [
            f"{script} does not import dlrover itself; if a module of yours does, say so with --dlrover of dlrover-run"
        ]
    installed = f"dlrover {version} is installed; 0.6.1 was tested" if version else "dlrover is not installed here"
    lines = [installed]
    if line := refusal(script, found):
        return [*lines, f"refused: {line}"]
    lines.append("it gets DLRover's variables: WORKER_NUM is the most nodes, NODE_NUM and NODE_RANK are the world's")
    if found.checkpointers:
        lines += [
            f"{', '.join(found.checkpointers)}: a process beside the workers keeps what is saved to memory; a crash"
            " resumes from there",
            "before a growth or a leave, what is in memory goes to the disk: from one node that has all of it (DDP),"
            " or from all nodes, if all have the same step (FSDP, DeepSpeed)",
        ]
    if found.replicas:
        lines.append("replica_count: copies are dealt to the nodes of the open world")
    if found.loader:
        lines.append("ElasticDataLoader: the batch size is the script's; nobody tunes it")
    if found.trainer:
        lines.append("ElasticTrainer: its steps are heard, at most every 15 s")
    if not found.checkpointers:
        lines.append("nothing of Flash Checkpoint: each change restarts the script from what it loads by itself")
    return lines
