"""What docs/bring-your-script.md promises of each kind of script, and tests that play a join, a leave and a kill."""

from __future__ import annotations

from typing import NamedTuple

FIXES = "with [`--dlrover-fixes`](dlrover.md#with---dlrover-fixes)"


class Row(NamedTuple):
    """One kind of script.

    Attributes:
        same_batch: the cell of that column: "yes" where the session or the plugin deals the samples, else "no", or
            what it takes.
        tests: `file::test` below `tests/integration`.
    """

    same_batch: str
    tests: tuple[str, ...]


# By the first words of the row.
ROWS: dict[str, Row] = {
    "a loop with DDP": Row(
        "yes",
        (
            "test_membership.py::test_joins_lose_nothing",
            "test_membership.py::test_a_leave_loses_nothing",
            "test_membership.py::test_a_killed_node",
        ),
    ),
    "a loop with DeepSpeed": Row(
        "yes", ("test_membership.py::test_other_stages", "test_membership.py::test_a_mixed_scene")
    ),
    "a loop with FSDP2": Row("yes", ("test_bring_your_script.py::test_fsdp2_with_torchs_distributed_checkpoint",)),
    "no loop of your own": Row("yes", ("test_bring_your_script.py::test_a_trainer_without_a_loop",)),
    "Hugging Face's `Trainer`": Row(
        "yes",
        (
            "test_hf_trainer.py::test_ddp_through_changes_of_the_world",
            "test_bring_your_script.py::test_trls_trainers",
        ),
    ),
    "an unchanged `Trainer`": Row("no", ("test_adoption.py::test_a_script_of_hugging_faces_goes_on",)),
    "ms-swift": Row("yes", ("test_swift.py::test_changes_of_the_world", "test_swift.py::test_a_join_and_a_kill")),
    "DLRover's classes": Row(
        FIXES,
        (
            "test_dlrover.py::test_growth_crash_leave_and_kill",
            "test_dlrover.py::test_a_crash_resumes_from_memory",
            "test_dlrover_fixes.py::test_worlds_of_one_two_and_three_of_four",
        ),
    ),
    "nanoGPT": Row("no", ("test_adoption.py::test_scripts_of_other_layouts_go_on",)),
    "Accelerate": Row("no", ("test_adoption.py::test_scripts_of_other_layouts_go_on",)),
    "diffusers' examples": Row("no", ("test_adoption.py::test_scripts_of_other_layouts_go_on",)),
    "Lightning": Row("no", ("test_adoption.py::test_a_script_of_lightnings_goes_on",)),
    "DeepSpeed as it is": Row("no", ("test_adoption.py::test_a_deepspeed_script_without_a_session",)),
    "anything else": Row(
        "no",
        (
            "test_shapes.py::test_a_newcomer_ends_no_healthy_job_of_a_plain_script",
            "test_shapes.py::test_the_next_number_of_nodes_is_tried",
            "test_shapes.py::test_a_plain_script_that_does_nothing_about_a_notice_is_not_waited_for",
        ),
    ),
}
