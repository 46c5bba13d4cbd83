"""ms-swift and Hugging Face ``Trainer`` runs made elastic, without being rewritten. See ``docs/ms-swift.md``.

- ``dalsegno.swift_plugin.hf.elastic(trainer)``: any Hugging Face Trainer; needs no ms-swift.
- ``dlrover-run … -m dalsegno.swift_plugin.sft …`` (or ``pt``, ``rlhf``): the flags of ``swift sft …``, and ours.
- ``--external_plugins $(python -m dalsegno.swift_plugin) --callbacks dalsegno``: the same for ``swift sft`` itself.

Importing this package imports none of them.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ("PLUGIN",)

PLUGIN = Path(__file__).with_name("external") / "dalsegno_swift_plugin.py"
"""The file for ms-swift's ``--external_plugins``."""
