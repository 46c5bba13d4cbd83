"""A `Trainer` for people who have no framework, and its strategies."""
