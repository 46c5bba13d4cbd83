"""Processes that have imported what a worker needs, and run its script ahead of its place in a world."""
