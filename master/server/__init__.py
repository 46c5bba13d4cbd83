"""Carries out the brain's decisions: gRPC, streams, turns and time."""
