"""A whole Slurm on this machine, and jobs in it."""
