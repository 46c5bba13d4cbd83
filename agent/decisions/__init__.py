"""What the agent decides, pure: no I/O, no clock, no randomness, no thread."""
