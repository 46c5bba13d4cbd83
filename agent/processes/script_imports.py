"""What a training script imports, as its own text says it."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["ALWAYS", "imports_session", "modules_of"]

# The first DDP wrap imports torch._dynamo: seconds on a busy machine.
ALWAYS = ("torch", "torch.distributed", "torch._dynamo")
# Worth importing ahead where the script's text imports them: heavy, and silent about CUDA when they are imported.
_HEAVY = (
    "numpy",
    "deepspeed",
    "transformers",
    "accelerate",
    "datasets",
    "peft",
    "lightning",
    "torchvision",
    "dalsegno.elastic",
    "dalsegno.swift_plugin",
    "swift",
)
# What these import only when they are used, which then takes seconds; "?": silently left out where it is not there.
_LATER = {
    "deepspeed": ("deepspeed.runtime.zero.muon.muon_optimizer?",),
    "dalsegno.elastic": ("dalsegno.elastic.training.entry?",),
    # Its package imports nothing by itself.
    "transformers": ("transformers.trainer?",),
    "dalsegno.swift_plugin": ("dalsegno.swift_plugin.hf.trainer?",),
    "swift": ("swift.pipelines.train.sft?", "swift.trainers.seq2seq_trainer?", "dalsegno.swift_plugin.swift_hooks?"),
}
_IMPORT = re.compile(r"^[ \t]*(?:import|from)[ \t]+([\w.]+)", re.MULTILINE)
# A script is text of a person's; more than this is not read to guess what it imports.
_MAX_TEXT = 1 << 20


def modules_of(script: Path | str | None) -> tuple[str, ...]:
    """The heavy modules to import for a script.

    Args:
        script: Its file, whose text is looked at; or the name of a module, which alone counts: to find its file could
            take imports. None: neither.
    """
    named = _named_by(script)
    wanted = [module for module in _HEAVY if any(name == module or name.startswith(f"{module}.") for name in named)]
    later = [one for module in wanted for one in _LATER.get(module, ())]
    if "deepspeed" in wanted and "dalsegno.elastic" in wanted:
        later.append("dalsegno.elastic.deepspeed?")
    return (*ALWAYS, *wanted, *later)


def imports_session(script: Path | str | None) -> bool:
    """Whether the script's own text says that it may call `session()`. (Of what it imports see `when_imported`.)

    Args:
        script: As for `modules_of`.
    """
    packages = ("dalsegno.elastic", "dalsegno.swift_plugin")
    return any(
        name == "dalsegno" or name.startswith(tuple(f"{one}." for one in packages)) or name in packages
        for name in _named_by(script)
    )


def _named_by(script: Path | str | None) -> set[str]:
    if isinstance(script, str):
        # Those run ms-swift.
        return {script, "swift"} if script.startswith("dalsegno.swift_plugin.") else {script}
    if script is None or not script.is_file():
        return set()
    with open(script, encoding="utf-8", errors="replace") as file:
        return set(_IMPORT.findall(file.read(_MAX_TEXT)))
