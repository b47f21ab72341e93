"""Imported by Python at its start: a server that the tests start "without a card" sees none, and constants of the
project have the values that a test asks for (tests/fake_card/python/sitecustomize.py)."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

os.environ["FAKE_CARD_KERNELS"] = "none"
if os.environ.get("FAKE_CARD_DEVICES") == "0":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
runpy.run_path(str(Path(__file__).parents[2] / "fake_card" / "python" / "sitecustomize.py"))
