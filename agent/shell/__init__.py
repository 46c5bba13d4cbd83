"""Carries the decisions out: torch's agent, the effects, the mailbox, the console."""
