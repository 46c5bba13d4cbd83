"""What a run goes on from: never silently from less than there is."""

from __future__ import annotations

from itertools import product

import pytest

from dalsegno.relay.recovery import PodKnowledge, Way, way_of

FLAGS = (False, True)
EVERY = [
    PodKnowledge(intact, damaged, head, milestones, baseline, allowed)
    for intact, damaged, head, milestones, baseline, allowed in product(FLAGS, FLAGS, FLAGS, (0, 2), FLAGS, FLAGS)
]


@pytest.mark.parametrize("known", EVERY)
def test_the_best_that_there_is_is_taken(known: PodKnowledge) -> None:
    """The volume first; then a milestone; a recorded checkpoint out of sight is waited for."""
    way = way_of(known)
    if known.intact:
        assert way is Way.VOLUME
    elif not known.allowed and known.milestones:
        assert way is Way.MILESTONE
    elif not known.allowed and known.damaged:
        assert way is Way.STUCK
    elif not known.allowed and known.head:
        assert way is Way.LOOK
    else:
        assert way is (Way.BASELINE if known.baseline else Way.SCRATCH)
