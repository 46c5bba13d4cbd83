"""What a run goes on from: never silently from less than there is."""

from __future__ import annotations

from itertools import product

import pytest

from dalsegno.relay.recovery import Age, PodKnowledge, Way, in_line, way_of

FLAGS = (False, True)
EVERY = [
    PodKnowledge(intact, damaged, head, milestones, baseline, allowed, newer)
    for intact, damaged, head, milestones, baseline, allowed, newer in product(
        *(FLAGS, FLAGS, FLAGS, (0, 2), FLAGS, FLAGS, FLAGS)
    )
    if milestones or not newer
]


@pytest.mark.parametrize("known", EVERY)
def test_the_best_that_there_is_is_taken(known: PodKnowledge) -> None:
    """The newest of volume and hub; then a milestone; a recorded checkpoint out of sight is waited for."""
    way = way_of(known)
    if known.intact:
        assert way is (Way.MILESTONE if known.newer else Way.VOLUME)
    elif not known.allowed and known.milestones:
        assert way is Way.MILESTONE
    elif not known.allowed and known.damaged:
        assert way is Way.STUCK
    elif not known.allowed and known.head:
        assert way is Way.LOOK
    else:
        assert way is (Way.BASELINE if known.baseline else Way.SCRATCH)


@pytest.mark.parametrize(
    ("age", "counts"),
    [
        *(((1, 40, 1), True), ((1, 40, 2), False), ((1, 60, 1), False)),
        *(((2, 50, 1), True), ((2, 70, 1), False), ((3, 80, 1), False), ((4, 90, 1), True), ((4, 91, 1), False)),
    ],
)
def test_what_the_run_has_gone_back_behind_is_not_of_its_line(age: Age, counts: bool) -> None:
    """Epoch 2 began from step 40 of the first one, and so did 3, which was left; 4 began from step 60 of the second."""
    assert in_line(age, (4, 90, 1), {2: (1, 40, 1), 3: (1, 20, 1), 4: (2, 60, 1)}) is counts


def test_a_gap_in_the_line_is_not_known() -> None:
    """Nothing of the second epoch is left that says from what it began."""
    began = {3: (2, 60, 1)}
    assert in_line((1, 40, 1), (3, 70, 1), began) is None
    assert in_line((2, 50, 1), (3, 70, 1), began) is True
    assert in_line((2, 70, 1), (3, 70, 1), began) is False
    assert in_line((1, 40, 1), (2, 60, 1), {2: (2, 60, 1)}) is None, "a manifest that makes no sense"


def test_an_epoch_that_began_anew_has_nothing_before_it() -> None:
    assert in_line((1, 1, 0), (2, 10, 1), {2: (0, 0, 0)}) is False
