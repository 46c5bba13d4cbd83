"""Several masters of one job: which of them leads."""
