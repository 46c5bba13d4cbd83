"""Any Hugging Face ``Trainer`` made elastic: ``elastic(trainer)`` before ``trainer.train()``; needs no ms-swift."""

from .plain import elastic, prepare, under_dlrover_run

__all__ = ("elastic", "prepare", "under_dlrover_run")
