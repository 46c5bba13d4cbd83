"""What a worker's last error says of its script, and what helps against it."""

from __future__ import annotations

import re

__all__ = ["advice", "tells_of_a_peer"]

# What torch says about a collective whose peer has ended: gloo, and NCCL (ncclRemoteError).
_PEER = re.compile("Connection closed by peer|Connection reset by peer|ncclRemoteError|remote process exited")

# What DeepSpeed says of a checkpoint in the other form than its configuration does.
_OTHER_SIZE = re.compile(r"used a DP world size of [0-9]+ but the current world size is [0-9]+")
_NOT_UNIVERSAL = re.compile("Invalid for universal checkpoint: .*latest_universal does not exist")
# Its rank 1 found rank 0's model states in memory, and then has no room for them.
_NO_MODEL_STATES = re.compile("^KeyError: 'model_states'")
# Of the directory that `latest` names, or of the one above if there is nothing in that file.
_NO_CHECKPOINT = re.compile(r"^AssertionError: assert len\(self\.ckpt_list\) > 0")
# What torch says of weights that were saved with DistributedDataParallel around the model, and without, or the reverse.
_WRAPPED = re.compile(r'(Missing|Unexpected) key\(s\) in state_dict: "module\.')
_LOAD_UNIVERSAL = '"checkpoint": {"load_universal": os.environ.get("DALSEGNO_RESUME_FORM") == "universal"}'


def tells_of_a_peer(error: str) -> str:
    """What gloo or NCCL say in a line of a script's errors of another rank that is gone; empty if they do not."""
    found = _PEER.search(error)
    return found[0] if found else ""


def advice(error: str) -> str:
    """What helps against the error with which a worker ended, where the script's text must change; empty if unknown."""
    if _OTHER_SIZE.search(error):
        return (
            "DeepSpeed loads what another number of ranks has saved only from universal files, and only if its "
            f"configuration says so: put in {_LOAD_UNIVERSAL}, or start with --deepspeed-load-universal;"
            " either needs '${save_dir}' for the directory where the script saves"
        )
    if _NO_MODEL_STATES.search(error):
        return (
            "DLRover's DeepSpeedCheckpointer fails (KeyError) in its first save after it has loaded from memory, where "
            "a node has several ranks (ZeRO 1 and 2): the next world loads from the disk; with --nproc-per-node=1 and"
            " an agent for each rank it does not fail"
        )
    if _NO_CHECKPOINT.search(error):
        return (
            "DeepSpeed finds no checkpoint where the file `latest` leads: a kill while it was written leaves it empty. "
            "Write the name of the last complete directory beside it into it; below '${save_dir}' each start gets a "
            "`latest` that leads to the run's last checkpoint"
        )
    if _NOT_UNIVERSAL.search(error):
        return (
            "DeepSpeed's configuration says load_universal, and this resume point has no universal files, as it needs "
            f"none: put in {_LOAD_UNIVERSAL} instead"
        )
    if _WRAPPED.search(error):
        return (
            "the script wraps its model (DistributedDataParallel) where it has several ranks, and saves the wrapper's "
            'names ("module.…"), so what one rank has saved does not load in several, or the reverse: let it save and '
            "load model.module, or keep to worlds of at least two ranks, such as --nnodes=2:4"
        )
    return ""
