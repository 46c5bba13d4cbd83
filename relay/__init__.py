"""One run that one pre-emptible machine after another carries on.

Each machine runs the ordinary agent at one node, beside a volume that outlives the machine. The Commander, which is
a master with an HTTP edge, decides who may write: the lease is the master's epoch, renewing it is the heartbeat, and
a checkpoint is the run's once it is committed. So there is no second authority, no second store and no second fence.
Milestones go to the Hugging Face Hub.
"""
