"""For ms-swift's ``--external_plugins``, together with ``--callbacks dalsegno``."""

from __future__ import annotations

from dalsegno.swift_plugin.swift_hooks import install

install()
