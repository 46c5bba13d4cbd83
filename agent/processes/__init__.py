"""Processes that the agent starts, and what they say: workers, standby workers, the keeper."""
