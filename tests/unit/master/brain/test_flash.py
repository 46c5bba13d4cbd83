"""Parts of a Flash Checkpoint on several nodes: all write the same step, or nobody writes."""

from __future__ import annotations

from tests.support.jobs.masters import Driven, Node, all_join, settings


def broken(count: int) -> tuple[Driven, list[Node]]:
    """A world that has made steps and then broke."""
    job = Driven(settings())
    nodes = job.start(count)
    nodes[0].step(7)
    nodes[0].failed()
    return job, nodes


def words(nodes: list[Node]) -> list[int | None]:
    """What each node is told to write."""
    return [node.directive.flash_save if node.directive.HasField("flash_save") else None for node in nodes]


def holds(node: Node, step: int) -> None:
    node.step(7, epoch=1, flash_step=step)


def test_all_write_what_all_have() -> None:
    """Known with the last report, and not earlier."""
    _, nodes = broken(3)
    holds(nodes[0], 7)
    holds(nodes[2], 7)
    assert words(nodes) == [None] * 3
    holds(nodes[1], 7)
    assert words(nodes) == [7] * 3


def test_nobody_writes_what_one_has_not() -> None:
    """Another step, or none: known at once, without the others."""
    for other in (6, 0):
        _, nodes = broken(3)
        holds(nodes[0], 7)
        holds(nodes[1], other)
        assert words(nodes) == [0] * 3


def test_the_part_of_a_lost_node_is_not_waited_for() -> None:
    """It will never say what it had."""
    job, nodes = broken(2)
    holds(nodes[0], 7)
    assert words(nodes[:1]) == [None]
    nodes[1].hang_up()
    job.wait(60.0)
    assert words(nodes[:1]) == [0]


def test_only_the_first_word_of_a_node_counts() -> None:
    """What has been agreed stays so: others may be writing."""
    _, nodes = broken(2)
    holds(nodes[0], 7)
    holds(nodes[1], 7)
    holds(nodes[1], 6)
    assert words(nodes) == [7, 7]


def test_a_new_world_begins_without_a_word() -> None:
    """And knows how many of its nodes were not in the one before."""
    job, nodes = broken(2)
    for node in nodes:
        holds(node, 7)
    new = job.node()
    all_join([*nodes, new])
    job.wait(5.0)
    assert job.epoch == 2
    assert words([*nodes, new]) == [None] * 3
    assert new.directive.run.arrived == 1
