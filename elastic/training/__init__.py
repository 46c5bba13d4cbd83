"""The session and its loop: everything that a training script of its own meets."""
