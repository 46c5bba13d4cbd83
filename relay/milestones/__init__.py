"""Milestones: checkpoints of a run that also lie on the Hugging Face Hub.

A milestone is one revision of a repository whose ``run_manifest.json`` names every file of a committed checkpoint, with
size and SHA-256. The payload goes first. One commit then adds everything, so that a revision has a milestone whole or
not at all. Only what verifies against that manifest, byte by byte, is ever restored.

``mirror`` is a process beside the agent, and ``transfer`` is the process that it starts for each upload; only that one
imports ``huggingface_hub``. Both may be killed at any moment: what the next one needs lies on the volume, or on the
hub.
"""
