"""Facts about the images that hold without building them."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
from io import BytesIO
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser
from dockerfile_parse.util import WordSplitter

ROOT = Path(__file__).parents[3]
NAMES = ("Dockerfile", "Dockerfile.cpu")


class Image:
    """One Dockerfile: its stages in order, each with its instructions."""

    def __init__(self, path: Path) -> None:
        parser = DockerfileParser(fileobj=BytesIO(path.read_bytes()))
        self.stages: dict[str, list[tuple[str, str]]] = {}
        self.parents: dict[str, str] = {}
        name = ""
        for entry in parser.structure:
            word, value = entry["instruction"], entry["value"]
            if word == "FROM":
                self.parents[value.split()[-1]] = value.split()[0]
                name = value.split()[-1]
                self.stages[name] = []
            elif name and word != "COMMENT":
                self.stages[name].append((word, value))

    @property
    def last(self) -> str:
        return list(self.stages)[-1]

    def inherited(self, stage: str) -> list[tuple[str, str]]:
        """The instructions of a stage and of those it is built on, oldest first."""
        parent = self.parents[stage]
        return [*(self.inherited(parent) if parent in self.stages else []), *self.stages[stage]]

    def values(self, stage: str, word: str) -> list[str]:
        return [value for instruction, value in self.inherited(stage) if instruction == word]

    def environment(self, stage: str) -> dict[str, str]:
        pairs = [pair for value in self.values(stage, "ENV") for pair in WordSplitter(value).split(dequote=True)]
        return dict(pair.split("=", 1) for pair in pairs)


@pytest.fixture(params=NAMES)
def image(request: pytest.FixtureRequest) -> Image:
    return Image(ROOT / "docker" / request.param)


@pytest.mark.parametrize("stage", ["tercet", "sagemaker"])
def test_runs_as_a_user_without_rights_given_by_number(image: Image, stage: str) -> None:
    user = image.values(stage, "USER")[-1]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "Kubernetes checks runAsNonRoot against a number only"
    words = [word for word, _ in image.inherited(stage)]
    assert "RUN" not in words[words.index("USER") :], "whatever is made later belongs to that user"


def test_the_last_stage_is_the_server(image: Image) -> None:
    assert image.last == "tercet"
    assert json.loads(image.values("tercet", "ENTRYPOINT")[-1]) == ["/opt/tercet/docker/entrypoint.sh"]
    assert json.loads(image.values("sagemaker", "ENTRYPOINT")[-1]) == ["/opt/tercet/docker/sagemaker-entrypoint.sh"]
    assert image.values("tercet", "CMD") == [], "what follows the image's name are the launcher's arguments"


def test_the_contract_with_those_who_run_tgis_image(image: Image) -> None:
    environment = image.environment("tercet")
    assert environment["PORT"] == "80" and environment["HF_HOME"] == "/data"
    assert image.values("tercet", "EXPOSE") == ["80"]
    assert any("/tgi-entrypoint.sh" in run for run in image.values("tercet", "RUN"))
    assert image.environment("sagemaker")["PORT"] == "8080"


def test_the_build_says_what_it_was_made_from(image: Image) -> None:
    arguments = image.values("tercet", "ARG")
    assert {"GIT_SHA", "DOCKER_LABEL"} <= set(arguments)
    environment = image.environment("tercet")
    assert environment["GIT_SHA"] == "$GIT_SHA" and environment["DOCKER_LABEL"] == "$DOCKER_LABEL"


def test_health_is_checked_without_a_shell(image: Image) -> None:
    for stage in ("tercet", "sagemaker"):
        (check,) = image.values(stage, "HEALTHCHECK")
        command = json.loads(check.partition("CMD")[2])
        assert command[-1] == "/opt/tercet/docker/healthcheck.py"
        assert "--start-period" in check, "a model may take long to load"


def test_bases_have_a_version(image: Image) -> None:
    text = (ROOT / "docker" / "Dockerfile").read_text() + (ROOT / "docker" / "Dockerfile.cpu").read_text()
    for default in re.findall(r"^ARG PYTHON_IMAGE=(.+)$", text, re.MULTILINE):
        name, _, tag = default.partition(":")
        assert name == "python" and re.match(r"\d+\.\d+-", tag)
    assert ":latest" not in text
    for parent in image.parents.values():
        assert parent == "${PYTHON_IMAGE}" or parent in image.stages


def test_packages_are_wheels_with_hashes(image: Image) -> None:
    (install,) = [run for run in image.values("builder", "RUN") if "-r " in run]
    words = shlex.split(install)
    assert "--require-hashes" in words and words[words.index("--only-binary") + 1] == ":all:"
    (own,) = [run for run in image.values("builder", "RUN") if "pip install" in run and "-r " not in run]
    assert "--no-deps" in own and "--no-build-isolation" in own, "a build must not fetch what has no hash"


def test_no_secret_and_no_cache_of_this_machine(image: Image) -> None:
    for stage in image.stages:
        names = set(image.environment(stage)) | {value.split("=")[0] for value in image.values(stage, "ARG")}
        assert not {name for name in names if re.search("TOKEN|SECRET|PASSWORD|API_KEY", name)}
        for run in image.values(stage, "RUN"):
            assert "pip install" not in run or "--no-cache-dir" in run
            assert "apt-get install" not in run or "rm -rf /var/lib/apt/lists/*" in run


def test_both_images_differ_only_where_they_must() -> None:
    gpu, cpu = (Image(ROOT / "docker" / name) for name in NAMES)
    assert list(gpu.stages) == list(cpu.stages)
    more = gpu.environment("tercet").items() - cpu.environment("tercet").items()
    assert {name for name, _ in more} == {
        "PATH", "LD_LIBRARY_PATH", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES",
    }  # fmt: skip
    words = [[word for word, _ in image.inherited("tercet")] for image in (gpu, cpu)]
    assert words[0] == words[1]


def ignored(path: str, patterns: list[str]) -> bool:
    """Docker's rule, for the two kinds of pattern that we use: the last that matches decides."""
    parts = path.split("/")
    decided = False
    for pattern in patterns:
        negated, bare = pattern.startswith("!"), pattern.removeprefix("!")
        anywhere = bare.startswith("**/")
        bare = bare.removeprefix("**/")
        assert "/" not in bare, f"{pattern}: teach this function that kind first"
        if any(fnmatch.fnmatchcase(part, bare) for part in (parts if anywhere else parts[:1])):
            decided = not negated
    return decided


def test_the_context_holds_what_is_copied_and_nothing_else(image: Image) -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    copied = [
        source
        for stage in image.stages
        for word, value in image.stages[stage]
        if word == "COPY" and "--from" not in value
        for source in value.split()[:-1]
    ]
    assert "src" in copied
    for source in copied:
        assert (ROOT / source).exists() and not ignored(source, patterns), source
    for other in (
        ".git/config",
        ".venv/bin/python",
        "tests/conftest.py",
        "src/wire/__pycache__/a.pyc",
        "src/a.so",
        "data/hub/x",
    ):
        assert ignored(other, patterns), other


def test_compilers_are_where_they_are_needed() -> None:
    """The operators are compiled while an image is built; Triton compiles for a running server."""
    gpu, cpu = (Image(ROOT / "docker" / name) for name in NAMES)
    for image in (gpu, cpu):
        runs = image.values("builder", "RUN")
        (compiler,) = [number for number, run in enumerate(runs) if re.search(r"install .*g\+\+", run)]
        assert compiler < next(number for number, run in enumerate(runs) if "pip install" in run)
    assert any("g++" in run for run in gpu.values("runtime", "RUN"))
    assert not any("g++" in run for run in cpu.values("runtime", "RUN"))
