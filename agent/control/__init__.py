"""The way to the master: its address, its client, and a master of the agents' own (`embedded`)."""
