"""The processes of a world: what they are started with, what they say, and why they ended."""
