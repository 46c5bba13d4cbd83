"""The processes of a world: what they are started with, what they report, and why they ended."""
