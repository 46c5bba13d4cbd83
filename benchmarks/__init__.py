"""What costs how much: `make bench`."""
