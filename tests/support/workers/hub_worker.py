"""`hooked.py ddp.py` of a script that first takes a model's configuration from Hugging Face's hub."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from huggingface_hub import hf_hub_download

import dalsegno.elastic

HOOKED = Path(__file__).resolve().parents[1] / "jobs" / "hooked.py"
# tests.support.jobs.silent_hub
MODEL = "somebody/tiny"

if __name__ == "__main__":
    # (A model of transformers asks in several ways, some of which wait for minutes or for ever.)
    assert Path(hf_hub_download(MODEL, "config.json")).is_file()
    assert dalsegno.elastic is not None
    sys.argv[:1] = [str(HOOKED), "ddp.py"]
    runpy.run_path(str(HOOKED), run_name="__main__")
