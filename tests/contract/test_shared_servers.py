"""Files that ask for the same server of a session go to one process of tests, and no others do."""

from __future__ import annotations

import pytest
from support.shared_servers import TESTS, scope_of

_E2E = "tests/e2e/conftest.py"


@pytest.mark.parametrize(
    ("file", "scope"),
    [
        ("tests/e2e/test_tools.py", f"{_E2E}::server"),  # by a fixture of its own
        ("tests/e2e/test_readme.py", f"{_E2E}::server"),
        ("tests/e2e/test_tokens.py", f"{_E2E}::llama_server"),
        ("tests/e2e/acceptance/test_acceptance.py", "tests/e2e/acceptance/conftest.py::server"),
        ("tests/e2e/acceptance/test_openai_acceptance.py", "tests/e2e/acceptance/conftest.py::server"),
        ("tests/e2e/scripted/test_answer_parts.py", "tests/e2e/scripted/conftest.py::scripted"),
    ],
)
def test_files_that_share_a_server(file: str, scope: str) -> None:
    assert scope_of(file) == scope


@pytest.mark.parametrize(
    "file",
    [
        "tests/e2e/test_https.py",  # has a server of its own
        "tests/e2e/test_start_failures.py",  # helpers alone are given one
        "tests/unit/launcher/bench/test_apis.py",  # a server for each test
        "tests/hostile/test_abuse.py",
        "tests/no_such_file.py",
    ],
)
def test_every_other_file_goes_by_itself(file: str) -> None:
    assert scope_of(file) == file


def test_a_group_is_of_end_to_end_tests() -> None:
    files = (f"tests/{path.relative_to(TESTS)}" for path in TESTS.rglob("test_*.py"))
    grouped = {file: scope for file in files if (scope := scope_of(file)) != file}
    assert len(set(grouped.values())) == 4
    assert all(file.startswith("tests/e2e/") for file in grouped)
