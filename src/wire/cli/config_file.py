"""Options from a YAML file, taken as written: YAML would make 1.10 the number 1.1, and `off` false."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wire.cli.options import Option
from wire.cli.other_servers.words import option_hint
from wire.cli.spelling import closest, flag_of
from wire.model_files import read_yaml

_NULL = "tag:yaml.org,2002:null"


@dataclass(frozen=True)
class Given:
    """What the file says of one option."""

    texts: Sequence[str]
    line: int
    """Counted from 1."""


def read(path: Path, options: Sequence[Option]) -> Mapping[str, Given]:
    """Return given options by field; `-` and `_` are the same.

    Raises:
        ValueError: One line that names the file.
    """
    # Imported here: only a start with such a file is worth the time.
    import yaml

    root = read_yaml(path, lambda text: yaml.compose(text, Loader=yaml.SafeLoader))
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise ValueError(f"{path} holds no options; it takes lines such as `port: 8080`")
    return given_in(root, options, path)


def given_in(node: Any, options: Sequence[Option], path: Path) -> Mapping[str, Given]:
    """Return the options that a mapping gives, by field; `node` is of yaml's `compose`.

    Raises:
        ValueError: One line that names the file and the line.
    """
    known = {opt.name: opt for opt in options if not opt.is_config_file}
    given: dict[str, Given] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        where, written = f"{path}, line {line}", str(key.value)
        name = written.replace("-", "_")
        if name not in known:
            found = closest(written, known, letters_per_edit=3)
            hint = f"; a similar one exists: '{found}'" if found else ""
            hint = option_hint(flag_of(name), {opt.flag for opt in options}) or hint
            raise ValueError(f"{where}: unknown option '{written}'{hint}")
        if name in given:
            raise ValueError(f"{where}: '{written}' is given again, after line {given[name].line}")
        texts = list(_texts(value))
        if None in texts or (len(texts) != 1 and not known[name].is_repeated):
            kind = "one value or a list of values" if known[name].is_repeated else "one value"
            raise ValueError(f"{where}: '{written}' takes {kind}")
        if texts != [""]:
            given[name] = Given([text for text in texts if text is not None], line)
    return given


def _texts(value: Any) -> Iterator[str | None]:
    """Yield a value's or list's texts, empty for null; None: no option takes it."""
    import yaml

    for node in value.value if isinstance(value, yaml.SequenceNode) else [value]:
        if isinstance(node, yaml.ScalarNode):
            yield "" if node.tag == _NULL else node.value
        else:
            yield None
