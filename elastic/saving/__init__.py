"""Saving as one act of all ranks, and where to go on."""
