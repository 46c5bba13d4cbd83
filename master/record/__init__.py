"""The job's durable record: where it is stored and in which format."""
