"""The job's durable record: where it lives and how it is spelt."""
