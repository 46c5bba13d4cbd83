"""Saving as one act of all ranks, and the choice of where to resume."""
