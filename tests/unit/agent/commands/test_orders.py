"""What a command that waits for an order takes for its end."""

from __future__ import annotations

import pytest

from dalsegno.agent.commands.orders import _gone, _saved
from dalsegno.protos import control_pb2 as pb


def commit(step: int, epoch: int = 1, *, in_memory: bool = False) -> pb.Checkpoint:
    return pb.Checkpoint(ref=pb.CheckpointRef(name=f"step-{step}.e{epoch}"), step=step, in_memory=in_memory)


BEFORE = commit(10)
ORDER = pb.OrderReply(step=40, number=3, before=BEFORE.ref.name)


@pytest.mark.parametrize(
    ("commits", "standing", "saved"),
    [
        ([BEFORE], 3, ""),
        # A save that had begun before the order.
        ([BEFORE, commit(38)], 3, ""),
        ([BEFORE, commit(41)], 0, "step-41.e1"),
        # Every tenth step goes to memory: what is newest is not what was ordered.
        ([BEFORE, commit(41), commit(50, in_memory=True)], 0, "step-41.e1"),
        ([BEFORE, commit(41, in_memory=True)], 3, ""),
        # The run went back to step 10.
        ([BEFORE, commit(11, 2)], 0, "step-11.e2"),
        ([BEFORE, commit(11, 2)], 3, ""),
        # Somebody ordered another one, because this one's save may have failed.
        ([BEFORE, commit(38)], 4, ""),
        ([BEFORE, commit(45)], 4, "step-45.e1"),
        # The record was lost, and with it the order.
        ([BEFORE], 0, ""),
        ([], 0, ""),
    ],
)
def test_a_save_by_order_is_over_when_the_master_says_so(
    commits: list[pb.Checkpoint], standing: int, saved: str
) -> None:
    """Not by its step alone: the run may have gone back since."""
    found = _saved(pb.StatusReply(checkpoints=commits, save_order=standing), ORDER)
    assert (found.ref.name if found is not None else "") == saved


@pytest.mark.parametrize(
    ("there", "became"),
    [
        ([], "b has gone"),
        ([("a", "1")], "b has gone"),
        ([("a", "1"), ("b", "2")], ""),
        ([("b", "3")], "b has gone, and was started again: to keep it away, have its supervisor start it no more"),
    ],
)
def test_a_node_that_its_supervisor_starts_again_has_gone_all_the_same(
    there: list[tuple[str, str]], became: str
) -> None:
    """It may be back before anybody looks: the order is carried out, and the person hears what happened."""
    nodes = [pb.NodeStatus(node=name, incarnation=incarnation) for name, incarnation in there]
    assert _gone(pb.StatusReply(nodes=nodes), pb.OrderReply(incarnation="2"), "b") == became


def test_a_master_that_does_not_say_who_goes() -> None:
    """An older one names no incarnation: whoever has the name is waited for."""
    assert _gone(pb.StatusReply(nodes=[pb.NodeStatus(node="b", incarnation="3")]), pb.OrderReply(), "b") == ""


def test_a_master_that_numbers_no_orders() -> None:
    """An older one tells the step only."""
    order = pb.OrderReply(step=40)
    assert _saved(pb.StatusReply(checkpoints=[commit(40)]), order) is None
    assert _saved(pb.StatusReply(checkpoints=[commit(40), commit(41)]), order) is not None
