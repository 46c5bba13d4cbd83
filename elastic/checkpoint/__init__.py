"""Checkpoints as directories that seal themselves, for workers and agents alike. Never imports torch.

Everything in a checkpoint is written once; ``MANIFEST.json`` comes last and names every file with size and checksum.
What has no readable manifest does not exist; what disagrees with its manifest is damaged and says which file.
"""

from dalsegno.protos.reads import Reads

from .best import Best, Tracked
from .errors import CheckpointDamaged, Damage
from .inventory import Inventory, Unsealed, inspect, inventory
from .layout import FORMS, MANIFEST, SHARDED, UNIVERSAL, WEIGHTS, CheckpointName, is_checkpoint_name
from .manifest import Cut, FileEntry, Manifest, Order, Position, Ref, Shape
from .retention import Retirement, lineage, retirable
from .run_directory import CheckpointStore, DirectoryInUse, LocalLock
from .saved_as import SavedAs
from .seal import describe, seal
from .verify import read_sealed, verify, verify_files, verify_listing

__all__ = (
    "FORMS",
    "MANIFEST",
    "SHARDED",
    "UNIVERSAL",
    "WEIGHTS",
    "Best",
    "CheckpointDamaged",
    "CheckpointName",
    "CheckpointStore",
    "Cut",
    "Damage",
    "DirectoryInUse",
    "FileEntry",
    "Inventory",
    "LocalLock",
    "Manifest",
    "Order",
    "Position",
    "Reads",
    "Ref",
    "Retirement",
    "SavedAs",
    "Shape",
    "Tracked",
    "Unsealed",
    "describe",
    "inspect",
    "inventory",
    "is_checkpoint_name",
    "lineage",
    "read_sealed",
    "retirable",
    "seal",
    "verify",
    "verify_files",
    "verify_listing",
)
