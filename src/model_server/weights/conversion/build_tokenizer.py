"""Makes tokenizer.json: `python -P -m model_server.weights.conversion.build_tokenizer FOLDER TARGET`.

The only place where transformers reads a tokenizer, without the environment's secrets, network, or the repository's
code. Prints one line if it refuses.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from model_server.weights.conversion.clean_process import die_with_parent
from wire.model_files import check_small_file

# Ids must be the same before and after; what a conversion tends to get wrong is in these.
SAMPLES = (
    "Hello, world!",
    " two  spaces\tand\na newline\n\n",
    "naïve café, Überraschung, 日本語, 한국어, emoji 🙂🙂, \u00a0 and 12345.678",
    "def f(x):\n    return x ** 2  # <s> </s>",
    "",
    " ",
)
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")

_SMALL_FILES = (".json", ".jinja", ".model", ".tiktoken", ".txt")


class Refused(Exception):
    """Why there is no tokenizer.json, in one line."""


def main(folder: Path, target: Path) -> int:
    die_with_parent()
    _hide_torch()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            convert(folder, target)
    except Refused as refusal:
        sys.stdout.write(f"{refusal}\n")
        return 1
    return 0


def convert(folder: Path, target: Path) -> None:
    """Write `target`, if transformers loads the tokenizer and ids agree.

    Raises:
        Refused: It does not, or they do not.
    """
    _check_files(folder)
    _check_packages(folder)
    try:
        reference = _loaded(folder)
        backend = _backend_of(reference)
        backend.no_padding()
        backend.no_truncation()
        backend.save(str(target))
        differing = _differing(reference, target)
    except Refused:
        raise
    except Exception as error:  # whatever a stranger's files lead to
        raise Refused(_explained(folder, error)) from error
    if not _has_vocabulary(reference):
        raise Refused(f"the files of {folder} hold no vocabulary of a tokenizer of its type: add its tokenizer.json")
    if differing is not None:
        raise Refused(f"the tokenizer of {folder} has no equal tokenizer.json: ids differ for {differing!r:.80}")


def _check_files(folder: Path) -> None:
    """Bound the files, which the library reads at any length."""
    for path in sorted(folder.glob("*")):
        if path.suffix in _SMALL_FILES and not path.is_dir():
            check_small_file(path, Refused)


def _check_packages(folder: Path) -> None:
    """Name missing packages, which transformers' message may not."""
    for path in sorted(folder.glob("*.model")):
        with path.open("rb") as file:
            package = "tiktoken" if _TIKTOKEN_LINE.match(file.read(4096)) else "sentencepiece"
        if importlib.util.find_spec(package) is None:
            raise Refused(f"{path} needs a package to become a tokenizer.json: `pip install {package}`")
    tekken = folder / "tekken.json"
    if tekken.is_file() and importlib.util.find_spec("mistral_common") is None:
        raise Refused(f"{tekken} needs a package to become a tokenizer.json: `pip install mistral-common`")


def _loaded(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)


def _backend_of(tokenizer: Any) -> Any:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return backend
    from transformers.convert_slow_tokenizer import convert_slow_tokenizer

    return convert_slow_tokenizer(tokenizer)


def _has_vocabulary(tokenizer: Any) -> bool:
    """Whether some sample has a known token: a wrong file gives none."""
    unknown = tokenizer.unk_token_id
    return any(set(tokenizer(text, add_special_tokens=False).input_ids) - {unknown} for text in SAMPLES)


def _differing(reference: Any, target: Path) -> str | None:
    """Return the first sample whose ids differ, if any."""
    from tokenizers import Tokenizer

    written = Tokenizer.from_file(str(target))
    for text in SAMPLES:
        for special in (True, False):
            if (
                written.encode(text, add_special_tokens=special).ids
                != reference(text, add_special_tokens=special).input_ids
            ):
                return text
    return None


def _explained(folder: Path, error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if "trust_remote_code" in text:
        return f"the tokenizer of {folder} is code of its repository, which is not run: it has no tokenizer.json"
    return f"the tokenizer of {folder} cannot be made a tokenizer.json: {text[:300]}"


def _hide_torch() -> None:
    """Hide torch, without which transformers' import takes half the time."""
    find_spec = importlib.util.find_spec

    def without_torch(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "torch" else find_spec(name, package)

    importlib.util.find_spec = without_torch


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
