"""A flag that only a child has is refused by the launcher with the variable that reaches the child."""

from __future__ import annotations

import pytest

from docs.generate.variables import inherited
from launcher.config import LauncherConfig, ServeConfig
from wire.cli.parsing import UsageError, parse

FLAGS = {opt.flag: opt.env for _, opt in inherited()}


def test_the_variables_are_those_of_the_children() -> None:
    assert LauncherConfig.handed_on == set(FLAGS.values())


@pytest.mark.parametrize("flag", ["--kserve-api", "--max-request-seconds=5", "--prefix-caching"])
def test_the_variable_is_named(flag: str) -> None:
    name = FLAGS[flag.partition("=")[0]]
    with pytest.raises(UsageError, match=f"^unexpected argument '--[a-z-]+' found; set the variable {name}, which is "):
        parse(ServeConfig, ["demo", flag], {})
    with pytest.raises(UsageError, match=r"found$"):
        parse(LauncherConfig, ["--colourless-green"], {})
