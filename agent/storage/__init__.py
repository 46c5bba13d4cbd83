"""The checkpoint directory as the agent sees it, and the job's private directory in it."""
