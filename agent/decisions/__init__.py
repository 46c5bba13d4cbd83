"""What the agent decides. Pure: no I/O, no clock, no randomness, no thread."""
