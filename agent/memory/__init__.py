"""Memory checkpoints: parts of them on this node, sent to other agents, fetched from them, and written to the disk.

A memory checkpoint is an ordinary checkpoint directory on tmpfs, of which each node has one of its own. What the ranks
of one node wrote is that node's *part*. `tier.MemoryTier` is all that the rest of the agent uses.
"""
