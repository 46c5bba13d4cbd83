"""What a loop of one's own calls: a `Session` that makes the data, takes the state, and hands out micro-batches.

Everything below is the lower layer: `BatchPlan`, `ElasticSampler`, `Batches`, `Accumulation`, `TrainingState` and
``elastic.deepspeed``, with what a session already knows (rank, resume point, seed, world) given by hand.
"""
