"""Which samples a rank trains on, in which order, and how they become micro-batches."""
