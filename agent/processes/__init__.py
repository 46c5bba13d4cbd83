"""Processes that the agent answers for: what they are, which signals they get, and that none outlives it."""
