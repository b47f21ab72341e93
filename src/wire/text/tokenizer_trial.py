"""A tokenizer.json, tried in a bounded process before serving: `python -P -m wire.text.tokenizer_trial FILE FOLDER`.

What a stranger's normalizer does, and loading takes, only a trial shows; the library ends a process without memory.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wire.model_files import read_tokenizer
from wire.processes.python_child import NEUTRAL_FOLDER, child_environment, module_command
from wire.text.escape import one_line
from wire.text.tokenizer_failure import reason_of
from wire.tokenizer_file import num_ids

CPU_LIMIT_S = 30
"""A file of 22 MB takes 1 s."""
_WALL_LIMIT_S = 120.0
_BASE_BYTES = 1 << 30
_BYTES_PER_BYTE = 64
"""Of memory for one of the file; 15 were measured."""
_MOST_GROWTH = 64
"""How many bytes the normalizer may make of one. Unicode's compatibility forms make 11 at most."""
_MOST_PATTERNS = 256
_SAMPLES = (
    "".join(map(chr, range(32, 127))) * 4,
    " two  spaces\tand\na newline\n\n" * 8,
    "na\u00efve caf\u00e9, \u65e5\u672c\u8a9e, \ud55c\uad6d\uc5b4, \u0440\u0443\u0441, \U0001f642 and 12345.678" * 8,
    "",
)
# The library's threads would each have address space of their own.
_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}


class Refused(Exception):
    """Why the tokenizer is not used, in one line."""


def failure_of(path: Path, folder: Path) -> str | None:
    """Say what is wrong with a tokenizer.json, if anything; run by the launcher."""
    try:
        ended = subprocess.run(
            [*module_command(__name__), str(path.absolute()), str(folder.absolute())],
            env=child_environment() | _ONE_THREAD,
            cwd=NEUTRAL_FOLDER,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_WALL_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{path} cannot be loaded and used in {_WALL_LIMIT_S:.0f} s"
    if ended.returncode == 0:
        return None
    lines = ended.stdout.decode("utf-8", "replace").splitlines()
    return (
        lines[-1] if lines else f"{path} takes more memory or time to load and use than a tokenizer of its size needs"
    )


def main(path: Path, folder: Path) -> int:
    try:
        _limit(path)
        _try(path, folder)
    except Refused as refusal:
        print(one_line(str(refusal)))  # noqa: T201
        return 1
    return 0


def _limit(path: Path) -> None:
    memory = _BASE_BYTES + _BYTES_PER_BYTE * (path.stat().st_size if path.exists() else 0)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S))


def _try(path: Path, folder: Path) -> None:
    from tokenizers import Tokenizer

    from wire.text.added_tokens import add_tokens
    from wire.text.prefix_space import set_prefix_space

    text = read_tokenizer(path, Refused)
    try:
        tokenizer: Any = Tokenizer.from_str(text)
        del text
    except BaseException as error:
        raise Refused(f"{path} cannot be used: {reason_of(error)}") from None
    set_prefix_space(tokenizer, folder, Refused)
    add_tokens(tokenizer, folder, Refused)
    try:
        num_ids(tokenizer.get_vocab(with_added_tokens=True).values(), Refused)
        normalizer = tokenizer.normalizer
        for sample in (*_SAMPLES, *(() if normalizer is None else _patterns(json.loads(normalizer.__getstate__())))):
            _use(tokenizer, sample)
    except Refused as refusal:
        raise Refused(f"{path}: {refusal}") from None
    except BaseException as error:
        raise Refused(f"{path} cannot be used: {reason_of(error)}") from None


def _use(tokenizer: Any, text: str) -> None:
    """Use it; failing on a text is no fault, as without an unknown token."""
    try:
        if tokenizer.normalizer is not None:
            _check_growth(text, tokenizer.normalizer.normalize_str(text))
        tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False)
    except (Refused, MemoryError):
        raise
    except BaseException as error:
        reason_of(error)  # raises what is none of the library's


def _check_growth(text: str, normalized: str) -> None:
    before, after = len(text.encode()), len(normalized.encode())
    if after > _MOST_GROWTH * max(before, _MOST_GROWTH):
        raise Refused(f"its normalizer makes {after} bytes of a text of {before}")


def _patterns(state: dict[str, Any]) -> Iterator[str]:
    """The texts that a normalizer replaces, and by what: what grows, grows on these."""
    steps = state.get("normalizers") if state.get("type") == "Sequence" else [state]
    found = dict.fromkeys(
        text
        for step in steps or ()
        if step.get("type") == "Replace"
        for text in (step["pattern"].get("String"), step["content"])
        if text
    )
    for text in list(found)[:_MOST_PATTERNS]:
        yield text * (1 + 64 // len(text))


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
