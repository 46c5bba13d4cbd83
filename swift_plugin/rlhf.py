"""Preference training (DPO and its kin) with ms-swift, elastically.

``dlrover-run … -m dalsegno.swift_plugin.rlhf …`` takes what ``swift rlhf`` does, and our flags (``entry``).
"""

from __future__ import annotations

from swift.pipelines.train.rlhf import SwiftRLHF

from .entry import main

if __name__ == "__main__":
    main(SwiftRLHF)
