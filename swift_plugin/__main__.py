"""``python -m dalsegno.swift_plugin`` prints the path of the file for ms-swift's ``--external_plugins``."""

from __future__ import annotations

from . import PLUGIN

print(PLUGIN)
