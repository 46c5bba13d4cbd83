"""The session and its loop: what a training script without our Trainer uses."""
