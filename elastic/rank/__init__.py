"""One rank: who it is, how it speaks to its agent and to the other ranks."""
