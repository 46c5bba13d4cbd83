"""Processes for which the agent is responsible: their facts, their signals, and that none outlives it."""
