"""Which tests play the rows of docs/bring-your-script.md: a join, a leave and a kill of each kind of script."""

from __future__ import annotations

# By the first words of the row: `file::test` below `tests/integration`.
ROWS: dict[str, tuple[str, ...]] = {
    "a loop with DDP": (
        "test_membership.py::test_joins_lose_nothing",
        "test_membership.py::test_a_leave_loses_nothing",
        "test_membership.py::test_a_killed_node",
    ),
    "a loop with DeepSpeed": ("test_membership.py::test_other_stages", "test_membership.py::test_a_mixed_scene"),
    "a loop with FSDP2": ("test_bring_your_script.py::test_fsdp2_with_torchs_distributed_checkpoint",),
    "no loop of your own": ("test_bring_your_script.py::test_a_trainer_without_a_loop",),
    "Hugging Face's `Trainer`": (
        "test_hf_trainer.py::test_ddp_through_changes_of_the_world",
        "test_bring_your_script.py::test_trls_trainers",
    ),
    "an unchanged `Trainer`": ("test_adoption.py::test_a_script_of_hugging_faces_goes_on",),
    "ms-swift": ("test_swift.py::test_changes_of_the_world", "test_swift.py::test_a_join_and_a_kill"),
    "DLRover's classes": (
        "test_dlrover.py::test_growth_crash_leave_and_kill",
        "test_dlrover.py::test_a_crash_resumes_from_memory",
    ),
    "nanoGPT": ("test_adoption.py::test_scripts_of_other_layouts_go_on",),
    "Accelerate": ("test_adoption.py::test_scripts_of_other_layouts_go_on",),
    "Lightning": ("test_adoption.py::test_a_script_of_lightnings_goes_on",),
    "DeepSpeed as it is": ("test_adoption.py::test_a_deepspeed_script_without_a_session",),
    "anything else": (
        "test_shapes.py::test_a_newcomer_ends_no_healthy_job_of_a_plain_script",
        "test_shapes.py::test_the_next_number_of_nodes_is_tried",
        "test_shapes.py::test_a_plain_script_that_does_nothing_about_a_notice_is_not_waited_for",
    ),
}
