"""The deterministic simulator: one seed, one schedule (docs/architecture.md)."""
