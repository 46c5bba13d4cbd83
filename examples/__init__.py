"""Runnable examples; `history` and `report` are shared with the tests."""
