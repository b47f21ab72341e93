"""`model-server quantize` on tiny models: what it writes serves, and an interrupted run writes the same."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.loading import load
from support.tiny_models import tiny_checkpoint

from model_server.errors import StartupError
from model_server.quantize import command
from model_server.quantize import output as files_of
from model_server.quantize.config import QuantizeConfig, check_quantize
from model_server.quantize.progress import Progress

TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 60


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def model(models: Path, model_type: str) -> Path:
    path = models / model_type
    return path if path.exists() else tiny_checkpoint(model_type, path)


def asked(source: Path, output: Path, tmp_path: Path, **changes: object) -> QuantizeConfig:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    config = QuantizeConfig(
        model_id=str(source), output_dir=output, calibration=text, num_samples=3, sequence_length=48, groupsize=32
    )
    return replace(config, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model_type", "changes", "num_matrices"),
    [
        ("llama", {}, 7),
        ("llama", {"act_order": True, "bits": 8, "groupsize": -1}, 7),
        pytest.param("gpt2", {}, 4, marks=pytest.mark.long),  # stored the other way round, one matrix for q, k and v
        pytest.param("phi3", {}, 4, marks=pytest.mark.long),  # several layers in one stored matrix
        pytest.param("mixtral", {}, 4 + 3 * 4, marks=pytest.mark.long),  # experts
        pytest.param("gemma2", {}, 7, marks=pytest.mark.long),
    ],
)
def test_what_it_writes_is_loaded_and_near_the_model(
    model_type: str, changes: dict[str, object], num_matrices: int, models: Path, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    source, output = model(models, model_type), tmp_path / "out"
    with caplog.at_level(logging.INFO):
        command.run(asked(source, output, tmp_path, **changes))
    said = json.loads((output / "config.json").read_text())["quantization_config"]
    assert (said["quant_method"], said["bits"], said["sym"]) == ("gptq", changes.get("bits", 4), True)
    assert sorted(path.name for path in output.iterdir()) == sorted(
        {path.name for path in source.iterdir() if path.name != "model.safetensors.index.json"} | {"model.safetensors"}
    )
    assert len({path.stat().st_mode for path in output.iterdir()}) == 1
    stored = load_file(output / "model.safetensors")
    codes = [name for name in stored if name.endswith(".qweight")]
    num_layers = sum("Layer" in record.message for record in caplog.records)
    assert len(codes) == num_matrices * num_layers
    assert not any(name.removesuffix("qweight") + "weight" in stored for name in codes)
    before, after = perplexities(caplog)
    assert after < before * (1.02 if changes.get("bits") == 8 else 1.5)
    runner = load(output)
    assert runner.traits.weight_bytes is not None
    assert runner.traits.weight_bytes < (load(source).traits.weight_bytes or 0)


def perplexities(caplog: pytest.LogCaptureFixture) -> tuple[float, float]:
    words = next(record.message for record in caplog.records if record.message.startswith("Perplexity")).split()
    return float(words[-4]), float(words[-2])


def test_the_perplexity_after_is_that_of_what_is_served(
    models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The model that is loaded from the files, over the same held-out ids."""
    from parity.protocol import PagedBatch

    from model_server.quantize.samples import from_file
    from model_server.text.tokenizer import Tokenizer

    source, output = model(models, "llama"), tmp_path / "out"
    config = asked(source, output, tmp_path)
    with caplog.at_level(logging.INFO):
        command.run(config)
    assert config.calibration is not None
    samples = from_file(config.calibration, Tokenizer.load(source), count=3, length=48, seed=0)
    for path, wanted in zip((source, output), perplexities(caplog), strict=True):
        ids = samples.held_out[0]
        logits = PagedBatch(load(path), [ids], 16).step((48,))[0]
        loss = torch.nn.functional.cross_entropy(logits[:-1].float(), ids[1:])
        assert float(loss.exp()) == pytest.approx(wanted, rel=1e-2)


def test_the_users_threads_are_kept(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(command, "tune", lambda *_, keep_threads: seen.append(keep_threads))
    for threads in (None, "1"):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if threads is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", threads)
        command.run(asked(model(models, "llama"), tmp_path / f"out-{threads}", tmp_path))
    assert seen == [False, True]


@pytest.fixture(scope="module")
def cut_run(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was interrupted behind the second of four layers."""
    done, folder = Progress.done, tmp_path_factory.mktemp("cut")

    def interrupted(self: Progress, layer: int, *rest: object) -> None:
        if layer == 2:
            raise KeyboardInterrupt
        done(self, layer, *rest)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Progress, "done", interrupted)
        command.run(asked(model(models, "llama"), folder / "run", folder))
    return folder / "run"


@pytest.fixture
def cut(cut_run: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(cut_run, tmp_path / "cut")


def test_an_interrupted_run_continues_and_writes_the_same(
    models: Path, tmp_path: Path, cut: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = model(models, "llama")
    command.run(asked(source, tmp_path / "whole", tmp_path))
    with pytest.raises(StartupError, match="holds an unfinished run with another model, other samples or options"):
        command.run(asked(source, cut, tmp_path, bits=8))
    with caplog.at_level(logging.INFO):
        command.run(asked(source, cut, tmp_path))
    assert any("2 layers of 4 are done already" in record.message for record in caplog.records)
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (cut / path.name).read_bytes(), path.name
    assert not (cut / ".quantize").exists()


@pytest.mark.parametrize("file", ["stream-0", "layer-00000.safetensors"])
def test_a_run_does_not_continue_on_files_that_it_did_not_write(
    file: str, models: Path, tmp_path: Path, cut: Path
) -> None:
    path = cut / ".quantize" / file
    data = path.read_bytes()
    for changed in (None, data[:-100], data + bytes(8), data[:-9] + b"\x7f" + data[-8:]):
        path.unlink()
        if changed is not None:
            path.write_bytes(changed)
        with pytest.raises(StartupError, match=rf"{file}.* start from the beginning with --no-resume$"):
            command.run(asked(model(models, "llama"), cut, tmp_path))
        path.touch()
    path.unlink()
    path.symlink_to("/dev/zero")  # which has no end
    with pytest.raises(StartupError, match=rf"{file} is not a regular file$"):
        command.run(asked(model(models, "llama"), cut, tmp_path))
    command.run(asked(model(models, "llama"), cut, tmp_path, resume=False))
    assert (cut / "config.json").exists()


def test_damaged_progress_is_named(models: Path, tmp_path: Path, cut: Path) -> None:
    path = cut / ".quantize" / "progress.json"
    whole = json.loads(path.read_text())
    four = {"num_done": 4, "layers": ["", "", "", ""]}
    changes: list[dict[str, object]] = [
        *({"num_done": number} for number in ("2", True, -1, 5, 3, None)),
        {"layers": None}, {"layers": []}, four, four | {"losses": [1.0, "x"]}, four | {"losses": [1.0, None]},
    ]  # fmt: skip
    for change in changes:
        path.write_text(json.dumps(whole | change))
        with pytest.raises(
            StartupError, match=r"progress\.json is damaged: start from the beginning with --no-resume$"
        ):
            command.run(asked(model(models, "llama"), cut, tmp_path))
    for text in ("", "[]", "{", "\0" * 99):
        path.write_text(text)
        with pytest.raises(StartupError, match=r"progress\.json"):
            command.run(asked(model(models, "llama"), cut, tmp_path))


def test_another_model_of_the_same_shapes_does_not_continue_a_run(models: Path, tmp_path: Path, cut: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(model(models, "llama"), other)
    weights = other / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-2] ^= 1
    weights.write_bytes(data)
    with pytest.raises(StartupError, match="holds an unfinished run with another model"):
        command.run(asked(other, cut, tmp_path))


def test_two_runs_do_not_share_a_folder(models: Path, tmp_path: Path, cut: Path) -> None:
    running = os.open(cut / ".quantize", os.O_RDONLY)
    fcntl.flock(running, fcntl.LOCK_EX)
    with pytest.raises(StartupError, match=r"^another run is writing to .*cut: wait for its end, or name another"):
        command.run(asked(model(models, "llama"), cut, tmp_path))
    os.close(running)


def test_nothing_from_outside_of_the_models_folder_is_copied(models: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(model(models, "llama"), source)
    (tmp_path / "secret").write_text("secret")
    os.mkfifo(source / "pipe")
    notes = source / "notes.txt"
    for target, message in (
        ("../secret", r"notes\.txt is a link that leads out of its folder"),
        ("/dev/zero", r"notes\.txt is a link that leads out of its folder"),
        ("pipe", r"notes\.txt is not a regular file"),
        ("nowhere", r"cannot read .*notes\.txt: No such file or directory"),
        ("notes.txt", r"cannot read .*notes\.txt: Too many levels of symbolic links"),
    ):
        notes.symlink_to(target)
        with pytest.raises(StartupError, match=message):
            command.run(asked(source, tmp_path / "out", tmp_path))
        notes.unlink()
    notes.symlink_to("config.json")
    command.run(asked(source, tmp_path / "out", tmp_path))
    assert (tmp_path / "out" / "notes.txt").is_file() and not (tmp_path / "out" / "notes.txt").is_symlink()


def test_nothing_is_written_through_links_or_into_pipes(models: Path, tmp_path: Path, cut: Path) -> None:
    other = tmp_path / "other"
    other.write_text("untouched")
    for path in (".quantize/progress.json.draft", "config.json"):
        (cut / path).symlink_to(other)
    os.mkfifo(cut / "tokenizer.json")
    command.run(asked(model(models, "llama"), cut, tmp_path))
    assert other.read_text() == "untouched"
    assert all(path.is_file() and not path.is_symlink() for path in cut.iterdir())


@pytest.mark.parametrize("resume", [True, False])
def test_a_run_is_not_kept_behind_a_link(resume: bool, models: Path, tmp_path: Path, cut: Path) -> None:
    (cut / ".quantize").rename(tmp_path / "elsewhere")
    (cut / ".quantize").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StartupError, match=r"\.quantize is a link: remove it, or name another folder$"):
        command.run(asked(model(models, "llama"), cut, tmp_path, resume=resume))
    assert (tmp_path / "elsewhere" / "progress.json").exists()


def test_a_model_that_is_sure_of_what_is_wrong(models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The perplexity is no number."""
    source = shutil.copytree(model(models, "llama"), tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    weights["lm_head.weight"] *= 1e6
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    with caplog.at_level(logging.INFO):
        command.run(asked(source, tmp_path / "out", tmp_path))
    assert any("inf before, inf after" in record.message for record in caplog.records)


def test_losses_that_are_no_numbers_are_those_of_a_run_that_continues(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = shutil.copytree(model(models, "llama"), tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    weights["lm_head.weight"].fill_(torch.inf)
    save_file(weights, source / "model.safetensors", {"format": "pt"})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(StartupError, match="No space left on device"):
        patch.setattr(files_of, "save_file", full)
        command.run(asked(source, tmp_path / "out", tmp_path))
    assert "NaN" in (tmp_path / "out" / ".quantize" / "progress.json").read_text()
    command.run(asked(source, tmp_path / "out", tmp_path))
    assert (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("where", ["posix_fallocate", "replace", "config"])
def test_a_full_disk_ends_in_one_line(
    where: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if where == "config":
            patch.setattr(files_of, "save_file", full)
        else:
            patch.setattr(os, where, full)
        with pytest.raises(StartupError, match=r"^cannot write .*out.*: No space left on device$"):
            command.run(asked(model(models, "llama"), tmp_path / "out", tmp_path))


def test_large_results_are_several_files_with_an_index(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = model(models, "llama")
    command.run(asked(source, tmp_path / "one", tmp_path))
    monkeypatch.setattr(files_of, "MOST_FILE_BYTES", 100_000)
    command.run(asked(source, tmp_path / "several", tmp_path))
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    whole = load_file(tmp_path / "one" / "model.safetensors")
    parts = {name: tensor for file in files for name, tensor in load_file(tmp_path / "several" / file).items()}
    assert whole.keys() == parts.keys() == index["weight_map"].keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 3}, r"^--bits 3: choose 4 or 8$"),
        ({"groupsize": 20}, r"^--groupsize 20: give a multiple of 8 from 16 on, or -1 for whole rows$"),
        ({"percdamp": 0.0}, r"^--percdamp 0: give a number above 0$"),
        ({"num_samples": 0}, r"^--num-samples must be at least 1"),
        ({"sequence_length": 100_000}, r"has \d+ tokens, fewer than a sample of --sequence-length 100000$"),
        ({"calibration": Path("/nowhere.txt")}, r"^--calibration /nowhere\.txt cannot be read"),
    ],
)
def test_what_cannot_be(changes: dict[str, object], message: str, models: Path, tmp_path: Path) -> None:
    config = asked(model(models, "llama"), tmp_path / "out", tmp_path, **changes)
    with pytest.raises(StartupError, match=message):
        check_quantize(config)
        command.run(config)


def test_other_folders_and_quantized_models_are_left_alone(models: Path, tmp_path: Path) -> None:
    source, output = model(models, "llama"), tmp_path / "out"
    command.run(asked(source, output, tmp_path))
    with pytest.raises(StartupError, match=r"out is not empty: name another folder$"):
        command.run(asked(source, output, tmp_path, calibration=None))
    assert not (output / ".quantize").exists(), "the model has written samples first"
    progress = output / ".quantize" / "progress.json"  # as of a run that was ended while it wrote the files
    progress.parent.mkdir()
    progress.write_text("{}")
    with pytest.raises(StartupError, match=r"out holds files beside an unfinished run: .* without --no-resume"):
        command.run(asked(source, output, tmp_path, resume=False))
    assert progress.exists(), "it was removed, and nothing begun in its place"
    with pytest.raises(StartupError, match=r"text\.txt is a file: name a folder for the quantized model$"):
        command.run(asked(source, tmp_path / "text.txt", tmp_path))
    with pytest.raises(StartupError, match=r"is quantized already \(gptq\): give the plain checkpoint$"):
        command.run(asked(output, tmp_path / "again", tmp_path))


def test_json_lines(models: Path, tmp_path: Path) -> None:
    lines = tmp_path / "texts.jsonl"
    several = f"{TEXT}\u2028{TEXT}"
    lines.write_text("\n".join(json.dumps({"text": several}, ensure_ascii=False) for _ in range(2)) + "\n\n")
    command.run(asked(model(models, "llama"), tmp_path / "out", tmp_path, calibration=lines))
    for wrong in ('{"content": "b"}', '{"text": 1}', '{"text": "\\ud800"}', "[" * 100_000, '"a"'):
        lines.write_text('{"text": "a"}\n' + wrong + "\n")
        with pytest.raises(StartupError, match=r"line 2: an object with a string `text` is expected$"):
            command.run(asked(model(models, "llama"), tmp_path / "other", tmp_path, calibration=lines))
