"""Pre-training with ms-swift, elastically.

``dlrover-run … -m dalsegno.swift_plugin.pt …`` takes what ``swift pt`` does, and our flags (``entry``).
"""

from __future__ import annotations

from swift.pipelines.train.pretrain import SwiftPretrain

from .entry import main

if __name__ == "__main__":
    main(SwiftPretrain)
