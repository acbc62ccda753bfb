"""Figures of long tests, kept where `VARLAP_FIGURES` names a JSON file (`make reliability`)."""

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

import varlap


def record(claim: str, **figures: Any) -> None:
    """Add figures under a claim's name."""
    if path := os.environ.get("VARLAP_FIGURES"):
        file = Path(path)
        origin = {"varlap": varlap.__version__, "torch": torch.__version__, "hardware": platform.machine()}
        kept = json.loads(file.read_text()) if file.exists() else {"origin": origin, "claims": {}}
        kept["claims"][claim] = figures
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(kept, indent=1) + "\n")
