"""Processes that have imported what a worker needs, and that run its script before its place in a world is known."""
