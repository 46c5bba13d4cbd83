"""Fuzzers: hostile calls, worker frames and damaged files, with somebody good beside them who must be served.

Every input follows from a seed and a number, so that a failure names what repeats it:
`python -m tests.fuzz calls|frames|damages --seed N …`.
"""
