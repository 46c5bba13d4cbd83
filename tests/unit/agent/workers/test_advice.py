"""What a worker's last error tells an agent of its script."""

from __future__ import annotations

import pytest

from dalsegno.agent.workers.advice import advice, tells_of_a_peer


@pytest.mark.parametrize(
    ("line", "tells"),
    [
        ("RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:30646. This is", True),
        (
            "RuntimeError: [/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:63188: Connection reset by peer",
            True,
        ),
        ("torch.distributed.DistBackendError: NCCL error: ncclRemoteError: A call failed possibly due to a", True),
        ("Last error: socketPollConnect: remote process exited or there was a network error", True),
        ("RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x2 and 3x4)", False),
        ("torch.OutOfMemoryError: CUDA out of memory", False),
    ],
)
def test_what_gloo_and_nccl_say_of_a_lost_peer_is_known(line: str, tells: bool) -> None:
    """Of scripts without a session nothing else tells."""
    assert bool(tells_of_a_peer(line)) is tells


OTHER_SIZE = (
    "[rank0]: deepspeed.runtime.zero.utils.ZeRORuntimeException: The checkpoint being loaded used a DP world size of 2 "
    "but the current world size is 1. Automatic adjustment of ZeRO's optimizer state partitioning with a new world size"
)
NO_UNIVERSAL = "ValueError: Invalid for universal checkpoint: /c/e3/latest_universal does not exist (see x)"


@pytest.mark.parametrize(
    ("line", "helps"),
    [
        (OTHER_SIZE, "or start with --deepspeed-load-universal"),
        (NO_UNIVERSAL, "needs none: put in "),
        ("ValueError: the world size is 2", ""),
    ],
)
def test_deepspeeds_errors_are_known(line: str, helps: str) -> None:
    """Each tells what to put into its configuration, which is the same."""
    text = advice(line)
    assert helps in text
    assert bool(text) == bool(helps)
    assert not text or '"load_universal": os.environ.get("DALSEGNO_RESUME_FORM") == "universal"' in text


def test_an_error_of_dlrovers_checkpointer_is_known() -> None:
    """The line of a rank, as the agent reports it."""
    line = "KeyError: 'model_states' (ds_train.py, line 359, in save_checkpoint) (see /logs/stderr.log)"
    assert "--nproc-per-node=1" in advice(line)
    assert not advice("KeyError: 'model'")


def test_a_latest_that_leads_nowhere_is_known() -> None:
    """DeepSpeed's own assertion has no words."""
    line = "AssertionError: assert len(self.ckpt_list) > 0 (train.py, line 46, in main) (see /logs/stderr.log)"
    assert "Write the name of the last complete directory beside it into it" in advice(line)
    assert not advice("AssertionError: assert len(names) > 0 (train.py, line 46, in main)")


@pytest.mark.parametrize(
    ("line", "helps"),
    [
        (
            'Error(s) in loading state_dict for DistributedDataParallel: Missing key(s) in state_dict: "module.a", "b"',
            True,
        ),
        ('Net: Missing key(s) in state_dict: "a". Unexpected key(s) in state_dict: "modules.a"', False),
        ('Net: Missing key(s) in state_dict: "a". Unexpected key(s) in state_dict: "module.a"', True),
    ],
)
def test_the_names_of_a_wrapped_model_are_known(line: str, helps: bool) -> None:
    """Such scripts wrap only where there are several ranks: the run of one rank does not grow."""
    assert ("--nnodes=2:4" in advice(line)) is helps
