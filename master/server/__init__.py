"""What carries the brain's decisions out: gRPC, streams, turns and time."""
