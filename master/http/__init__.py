"""The HTTP edge: what people and monitors read."""
