"""One rank: who it is, and how it speaks to its agent and to the other ranks."""
