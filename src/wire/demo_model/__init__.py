"""The demo model that `--model-id demo` serves: weights, tokenizer and chat template, as files beside this one.

It is trained by the scripts in the repository's `demo_model/` folder, whose README says what it can and cannot do.
"""

from pathlib import Path


def path() -> Path:
    """The folder that holds the model, in the layout of a downloaded model."""
    return Path(__file__).resolve().parent
