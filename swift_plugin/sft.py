"""Supervised fine-tuning with ms-swift, elastically.

``dlrover-run … -m dalsegno.swift_plugin.sft …`` takes what ``swift sft`` does, and our flags (``entry``).
"""

from __future__ import annotations

from swift.pipelines import SwiftSft

from .entry import main

if __name__ == "__main__":
    main(SwiftSft)
