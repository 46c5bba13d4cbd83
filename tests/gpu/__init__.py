"""What must be true on a card: `make test-gpu PYTHON=...`. Without one the same tests run on the CPU (docs/gpu.md)."""
