"""What the master decides. Pure: no I/O, no clock, no randomness, no thread."""
