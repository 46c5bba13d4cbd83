"""What the master decides, pure: no I/O, no clock, no randomness, no thread."""
