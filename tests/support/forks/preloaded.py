"""What processes of tests would import first; imported once by the process that they are forked from (`forked`)."""

import gc

import deepspeed
import deepspeed.runtime.zero.muon.muon_optimizer  # What its engine imports late, and a second of it.
import numpy
import torch
import torch._dynamo
import torch.distributed

import dalsegno.agent.commands.dlrover_run
import dalsegno.agent.standby.nursery
import dalsegno.elastic.deepspeed.engine
import dalsegno.elastic.training.entry

# As the console script imports it: gRPC reads how much it is to say only once.
with dalsegno.agent.commands.dlrover_run.quiet_grpc():
    import dalsegno.agent.commands.launch

__all__ = ["dalsegno", "deepspeed", "numpy", "torch"]

# The collector writes to every object it looks at, and what is written to is no longer shared with the forked.
gc.collect()
gc.freeze()
