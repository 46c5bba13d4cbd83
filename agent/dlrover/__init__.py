"""What is known of DLRover's client library: its names, its saver, what scripts use of it. Nothing here is its code."""
