"""What people type: `dlrover-run` and `dalsegno`."""
