"""In a worker: this project's order and plan behind the trainer classes of DLRover (`--dlrover-fixes`).

Their classes stay the user's own; ours are sub-classes of them, put in their place when their modules are imported.
"""
