"""A hub of models on loopback that `huggingface_hub` really talks to, in a process of its own, with faults on order."""
