"""The files of `--model-id demo`, trained by the repository's `demo_model/` scripts."""

from pathlib import Path


def path() -> Path:
    """The folder that holds the model, in the layout of a downloaded model."""
    return Path(__file__).resolve().parent
