"""Names by which DLRover's classes find their launcher."""

from __future__ import annotations

import pytest

from dalsegno.agent.dlrover import names


def test_the_first_agent_has_the_jobs_name() -> None:
    """As under DLRover's launcher; a second agent of the machine has another, because names are its only bounds."""
    assert [names.run_name("gpt", number) for number in range(3)] == ["gpt", "gpt.2", "gpt.3"]


@pytest.mark.parametrize("number", [0, 1, 99])
def test_a_long_name_fits_into_a_sockets_path(number: int) -> None:
    """The kernel takes 107 characters; two long jobs that begin alike stay apart."""
    name, other = (names.run_name("x" * 150 + end, number) for end in "ab")
    assert name != other
    longest = f"{names.sockets(name)}/sharedqueue_shard_dict_ckpt_meta_127.sock"
    assert len(longest) <= 107


def test_variables_of_a_world() -> None:
    """The batch is meant for the most nodes; replicas are dealt to those that are there."""
    known = names.job_variables("gpt.2", "/run/x") | names.world_variables(1, 3, 4)
    assert known["WORKER_NUM"] == "4"
    assert (known["NODE_NUM"], known["NODE_RANK"]) == ("3", "1")
    assert known["TORCHELASTIC_RUN_ID"] == "gpt.2"
    # Otherwise the library starts a saver of its own, which dies with local rank 0.
    assert known["ROLE_NAME"] == "dlrover-trainer"
    assert not any("MASTER" in name for name in known)
