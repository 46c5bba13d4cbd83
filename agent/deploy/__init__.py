"""Manifests for other people's supervisors: from a job in a dozen lines of YAML to Kubernetes, Slurm and systemd.

Pure functions from text, or a checked `Job`, to objects or text; `commands/render.py` reads and writes.
"""
