"""ms-swift's pipelines with the flags that are ours: what ``-m dalsegno.swift_plugin.sft`` and its siblings run."""

from __future__ import annotations

import sys
from dataclasses import dataclass, make_dataclass
from typing import Any

from .hf.plain import under_dlrover_run
from .swift_hooks import NAME, install


@dataclass
class ElasticArguments:
    """Our own flags.

    Attributes:
        universal_checkpoint: Changes of the world go through universal files. The agent reads this flag.
        global_batch_size: Samples per optimizer step over all ranks.
        fixed_micro_batch: Cut each global batch into the same micro-batches at every world size.
        memory_every: Steps between saves to the nodes' memory, or "auto".
        stay: Processes stay through changes of the world, with DDP.
    """

    universal_checkpoint: bool = False
    global_batch_size: int | None = None
    fixed_micro_batch: bool = False
    memory_every: str = ""
    stay: bool = False

    def __post_init__(self) -> None:
        args: Any = self
        if NAME not in args.callbacks:
            args.callbacks = [*args.callbacks, NAME]
        if self.global_batch_size is not None and not under_dlrover_run():
            args.gradient_accumulation_steps = _accumulation(self.global_batch_size, args)
        super().__post_init__()  # type: ignore[misc]  # ms-swift's


def _accumulation(global_batch_size: int, args: Any) -> int:
    from swift.utils import get_dist_setting

    at_once: int = args.per_device_train_batch_size * get_dist_setting()[2]
    steps, rest = divmod(global_batch_size, at_once)
    if rest or not steps:
        raise ValueError(
            f"--global_batch_size {global_batch_size} is no multiple of the {at_once} samples that all ranks compute "
            "at once: only under dlrover-run need it not be one"
        )
    return steps


def main(pipeline: Any, argv: list[str] | None = None) -> Any:
    """Runs one of ms-swift's training pipelines elastically.

    Args:
        pipeline: ``swift.pipelines.SwiftSft``, or one derived from it.
        argv: Default: the command line's arguments.
    """
    from swift.cli.main import parse_yaml_args
    from swift.cli.utils import try_use_single_device_mode

    install()
    argv = list(sys.argv[1:] if argv is None else argv)
    parse_yaml_args(argv)
    try_use_single_device_mode()
    theirs = pipeline.args_class
    arguments = make_dataclass(theirs.__name__, (), bases=(ElasticArguments, theirs))
    made = type(pipeline.__name__, (pipeline,), {"args_class": arguments})
    return made(argv).main()
