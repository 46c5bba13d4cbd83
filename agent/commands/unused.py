"""Flags of torchrun's and DLRover's that `dlrover-run` accepts and does not need, and what it says of them."""

from __future__ import annotations

import argparse
from typing import Any

from ..script import CAN_RUN_AHEAD
from ..storage.macros import misspelt

__all__ = ["IGNORED", "UNUSED", "ignored"]

# Accepted because scripts for DLRover or torchrun use them: name, whether it takes a value, why it is not needed here.
# Together with those of ours that have the same name, these are all of DLRover's.
IGNORED: tuple[tuple[str, bool, str], ...] = (
    ("--precheck", True, "see --network-check"),
    ("--network-check", False, "a node that cannot take part is noticed and named while the run goes on"),
    ("--comm-perf-test", False, "see --network-check"),
    ("--node-check", False, "see --network-check"),
    ("--exclude-straggler", False, "stragglers are not looked for"),
    ("--auto-tunning", False, "the batch plan follows from the world by itself"),
    ("--save-at-breakpoint", False, "every planned change saves first"),
    ("--accelerator", True, "torch finds it"),
    ("--training-port", True, "every epoch has a fresh store at a free port"),
    ("--numa-affinity", False, "use --numa-binding"),
    ("--membind-policy", True, "use --numa-binding"),
    ("--ucp-device-type", True, "the conversion runs on the CPU"),
    ("--node-rank", True, "the master gives the ranks"),
)
# Flags of torchrun that torch's launcher reads, and nothing here: name, torch's default, why.
UNUSED: tuple[tuple[str, Any, str], ...] = (
    ("rdzv-conf", "", "the rendezvous is the master's, with flags of its own such as --join-timeout and --quiet-time"),
    ("monitor-interval", 0.1, "a worker's exit is noticed at once"),
    ("start-method", "spawn", "workers are programs of their own"),
    ("shutdown-timeout", None, "workers have --drain-timeout to save, and have ended then"),
    ("run-path", False, "workers run the script that way anyway"),
)
# Flags that show this node to a master that is a service.
_FOR_A_SERVICE = ("--token-file", "--tls-ca", "--tls-cert", "--tls-key")


def ignored(options: argparse.Namespace) -> list[str]:
    """One line for each accepted flag that has no effect here."""
    lines = []
    for flag, _, why in IGNORED:
        if getattr(options, "ignored_" + flag.lstrip("-").replace("-", "_")) is not None:
            lines.append(f"{flag} is not needed and has no effect: {why}")
    for flag, value in (("--master-addr", options.meet_addr), ("--master-port", options.meet_port)):
        if value is not None and not options.meet:
            lines.append(f"{flag} is not needed and has no effect: use --master HOST:PORT")
    lines += [f"--{flag} has no effect: {why}" for flag, _, why in UNUSED if flag in options.unused]
    if options.auto_config and options.nproc_is_given and options.nnodes_is_given:
        lines.append("--auto-config has no effect: --nnodes and --nproc-per-node are given")
    given = [flag for flag in _FOR_A_SERVICE if getattr(options, flag[2:].replace("-", "_")) is not None]
    if given and not (options.master or options.meet):
        lines.append(f"{', '.join(given)} without --master: no effect, the embedded master has a token of its own")
    if options.rdzv_backend not in ("dalsegno", "static", "c10d"):
        line = f"--rdzv-backend={options.rdzv_backend} has no effect: dlrover-run has a rendezvous of its own"
        if options.rdzv_endpoint and options.master:
            line += f", and takes {options.master} for a dlrover-master; with c10d the node with that address hosts one"
        lines.append(line)
    if options.standalone and options.rdzv_endpoint and not options.own_endpoint:
        lines.append("--rdzv-endpoint has no effect: --standalone has a master of its own")
    if options.run_ahead == "always" and not CAN_RUN_AHEAD:
        lines.append("--run-ahead=always has no effect: it needs Python 3.11 or newer")
    for word, meant in misspelt(options.training_script_args):
        lines.append(f"{word} is handed to the script as it is: only '{meant}' is filled in here")
    return lines
