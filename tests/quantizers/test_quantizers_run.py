"""How a run of the libraries that quantize models ends: what is skipped, what is a fault, which environment is used."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from quantizers import __main__ as runner
from quantizers import environments, outcomes
from quantizers.compare import compare
from quantizers.environments import BrokenError, Environment, UnavailableError, made, said
from quantizers.outcomes import FLOORS, REFUSED, Case, Outcome, ending, of_writer, table

DOCUMENT = environments.ROOT / "docs" / "quantization.md"
NONE_FOUND = """WARNING: Location 'file:///simple/torchao/' is ignored: it is neither a file nor a directory.
ERROR: Could not find a version that satisfies the requirement torchao==0.18.0 (from versions: none)
ERROR: No matching distribution found for torchao==0.18.0"""
NO_ADDRESS = "WARNING: Retrying after connection broken by 'NewConnectionError: Failed to establish a new connection'"
FORBIDDEN = "ERROR: HTTP error 403 while getting https://index.invalid/torchao.whl"
OTHER_VERSIONS = "ERROR: Could not find a version that satisfies torchao==99 (from versions: 0.17.0, 0.18.0)"
NOT_BUILT = "error: subprocess-exited-with-error\nERROR: Failed building wheel for torchao"
NO_SPACE = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for module in (environments, runner):
        monkeypatch.setattr(module, "WORK", tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def one_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes, "FLOORS", dict.fromkeys(FLOORS, (1, 1)))


@pytest.fixture
def library(tmp_path: Path) -> Environment:
    (tmp_path / "lists").mkdir()
    for name in ("torch", "torchao"):
        (tmp_path / "lists" / f"{name}.txt").write_text(f"{name}==1")
    torch = Environment("torch", tmp_path / "lists" / "torch.txt")
    return Environment("torchao", tmp_path / "lists" / "torchao.txt", torch)


class Commands:
    """Stands for venv and pip: makes the folders that they make, and says what a test says of the installation."""

    def __init__(self, says: str = "", *, of_venv: str = "") -> None:
        self.says, self.of_venv, self.ran = says, of_venv, list[Sequence[str]]()

    def __call__(self, command: Sequence[str]) -> str:
        self.ran.append(command)
        if "venv" not in command:
            return self.says
        if not self.of_venv:
            folder = Path(command[-1])
            inside = environments.TORCH.site_packages.relative_to(environments.TORCH.folder)
            for part in ("bin", inside):
                (folder / part).mkdir(parents=True, exist_ok=True)
            (folder / "bin" / "python").touch()
        return self.of_venv


def test_an_environment_is_made_once_and_anew_where_its_list_or_what_it_shares_changed(
    library: Environment, work: Path
) -> None:
    commands = Commands()
    first = made(library, commands)
    assert len(commands.ran) == 4, "torch's and the library's own"
    assert made(library, commands) == first
    assert len(commands.ran) == 4
    library.packages.write_text("torchao==2")
    second = made(library, commands)
    assert second != first
    assert len(commands.ran) == 6
    assert not first.exists(), "what nothing asks for any more takes no space"
    assert library.shared is not None
    library.shared.packages.write_text("torch==2")
    assert made(library, commands) != second
    assert len(commands.ran) == 10
    assert {path.name.partition("-")[0] for path in work.iterdir()} == {"lists", "torch", "torchao"}


def test_each_list_names_what_transformers_needs_and_torch_does_not_bring() -> None:
    """The lists are installed as they are, and torch comes without numpy."""
    for name in FLOORS:
        listed = environments.of_library(name).packages.read_text()
        assert re.search(r"^numpy==", listed, re.M), name


def test_an_environment_that_was_not_finished_is_made_again(library: Environment) -> None:
    with pytest.raises(BrokenError):
        made(library, Commands(NOT_BUILT))
    commands = Commands()
    assert made(library, commands).exists()
    assert len(commands.ran) == 4


@pytest.mark.parametrize("says", [NONE_FOUND, NO_ADDRESS, FORBIDDEN])
def test_what_the_index_does_not_give_is_unavailable(library: Environment, says: str) -> None:
    with pytest.raises(UnavailableError) as caught:
        made(library, Commands(says))
    assert str(caught.value) in says


@pytest.mark.parametrize("says", [OTHER_VERSIONS, NOT_BUILT, NO_SPACE, "nothing came of python in 1800 s"])
def test_any_other_failure_is_a_fault(library: Environment, says: str) -> None:
    with pytest.raises(BrokenError, match="torch is not installed"):
        made(library, Commands(says))


def test_an_environment_that_cannot_be_made_is_a_fault(library: Environment) -> None:
    with pytest.raises(BrokenError, match="no environment: Error: no space"):
        made(library, Commands(of_venv="Traceback\nError: no space"))


def test_a_command_says_why_it_failed(work: Path) -> None:
    assert said(["true"]) == ""
    assert said(["sh", "-c", "echo broken >&2; exit 3"]) == "broken"
    assert said(["false"]) == "false ended with 1"
    assert "No such file" in said([str(work / "missing")])


def test_what_takes_too_long_ends_with_all_that_it_has_started(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what was left writes into the environment that is made next."""
    monkeypatch.setattr(environments, "INSTALL_LIMIT_S", 0.5)
    os.mkfifo(work / "pipe")
    # Opened for reading too, so that opening does not wait; the child inherits the end for writing.
    reader = os.open(work / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    assert said(["sh", "-c", f"sleep 60 > {work}/pipe & wait"]).startswith("nothing came of sh -c")
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b"", "nobody writes any more"
    os.close(reader)


def tried(status: int = 0, kinds: Sequence[str] = (), failure: Exception | None = None) -> Outcome:
    def installed(_: str) -> Path:
        if failure:
            raise failure
        return Path("python")

    def write(_: Path, __: str, folder: Path) -> int:
        for number, kind in enumerate(kinds):
            (folder / f"{number}-{kind}").mkdir()
        return status

    return runner.tried("bitsandbytes", installed, write, lambda case: Case(case.name, case.name[2:]))


def test_an_unavailable_library_is_skipped_by_name_and_with_its_reason() -> None:
    outcome = tried(failure=UnavailableError("no torchao"))
    assert not outcome.has_failed
    assert table(outcome) == "bitsandbytes: skipped: no torchao"


@pytest.mark.parametrize(
    ("outcome", "says"),
    [
        ({"failure": BrokenError("no wheel")}, "no wheel"),
        ({}, "made none of 0 checkpoints"),
        ({"kinds": ("not made", "not made")}, "made none of 2 checkpoints"),
        ({"status": 1, "kinds": ("equal",)}, "ended with 1: see bitsandbytes.log"),
        ({"kinds": ("equal", "different")}, "FAIL 1-different"),
        ({"kinds": ("equal", "crashed")}, "FAIL 1-crashed"),
        ({"kinds": ("equal", "refused")}, "FAIL 1-refused"),
    ],
)
def test_what_was_not_tried_wholly_has_failed(outcome: dict[str, object], says: str) -> None:
    found = tried(**outcome)  # type: ignore[arg-type]
    assert found.has_failed
    assert says in table(found)


def test_a_refusal_that_is_known_and_says_why_is_none() -> None:
    library, pattern = "torchao", REFUSED["torchao"][0]
    equal = Case("int8", "equal")
    assert not of_writer(library, 0, [equal, Case(pattern, "refused", "scales are infinite")]).has_failed
    assert of_writer(library, 0, [equal, Case(pattern, "refused")]).has_failed


def test_a_library_that_writes_fewer_forms_than_before_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes, "FLOORS", {"torchao": (2, 3)})
    equal, refused = Case("int8", "equal"), Case(REFUSED["torchao"][0], "refused", "scales are infinite")
    assert not of_writer("torchao", 0, [equal, equal, refused]).has_failed
    assert not of_writer("torchao", 0, [equal, equal, equal]).has_failed, "what was refused is served"
    assert of_writer("torchao", 0, [equal, equal, Case("int4", "not made")]).has_failed
    assert "1 checkpoints are equal and 2 refused, where 2 and 1 were" in table(
        of_writer("torchao", 0, [equal, refused, refused])
    )


def test_the_floors_are_the_counts_of_the_document() -> None:
    rows = re.findall(r"^\| ([\w-]+) [\d.]+ \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", DOCUMENT.read_text(), re.M)
    assert {
        name.lower().replace("-", "_"): (int(equal), int(equal) + int(refused)) for name, _, equal, refused, _ in rows
    } == FLOORS
    assert all(int(total) == sum(map(int, parts)) for _, total, *parts in rows)


def test_a_checkpoint_that_its_writer_left_in_the_middle_is_a_fault(work: Path) -> None:
    assert compare(work).kind == "crashed"
    (work / "expected.safetensors").write_bytes(b"half")
    assert compare(work).kind == "crashed"


def test_a_run_that_tried_nothing_has_not_passed() -> None:
    skipped, passed = Outcome("torchao", skipped="no index"), Outcome("bitsandbytes", [Case("nf4", "equal")])
    failed = Outcome("autoawq", fault="no wheel")
    assert ending([skipped])[0] == 2
    assert ending([skipped, passed]) == (0, "1 libraries tried; skipped: torchao")
    assert ending([skipped, failed]) == (1, "1 libraries tried; skipped: torchao; failed: autoawq")


def test_each_table_is_printed_as_its_library_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said_before = []

    def next_one(library: str) -> Outcome:
        said_before.append(capsys.readouterr().out)
        return Outcome(library, [Case("nf4", "equal")])

    monkeypatch.setattr(runner, "tried", next_one)
    assert runner.main(["torchao", "autoawq"]) == 0
    assert "torchao: 1 equal" in said_before[1]
    with pytest.raises(SystemExit, match="no libraries torch;"):
        runner.main(["torch"])
