"""Which runner a checkpoint gets, what is refused before anything is loaded, and whose code is run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from parity.library import load as load_from_library
from parity.library import make_case
from parity.protocol import assert_equal_logits, run_protocol
from safetensors.torch import save_file
from support.loading import child_environment, load
from support.tiny_models import tiny_checkpoint
from support.tiny_types import type_checkpoint, type_config, type_model

from model_server.errors import StartupError
from model_server.models.decoder.decoder import Decoder
from model_server.models.hf.paged import TransformersRunner
from model_server.models.hf.stateful import StatefulRunner
from model_server.runner.runner import Runner

# Leaves a mark where it is imported.
BOOBY_TRAP = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path(__file__).with_name("mark").touch()
Path({mark!r}).touch()

class TrapConfig(LlamaConfig):
    model_type = "trap"

class TrapModel(LlamaForCausalLM):
    config_class = TrapConfig
"""


def change_config(path: Path, **fields: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize(("model_type", "runner"), [("olmo", TransformersRunner), ("rwkv", StatefulRunner)])
def test_the_choice_and_its_log_line(
    model_type: str, runner: type, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    type_checkpoint(model_type, tmp_path)
    with caplog.at_level("INFO", "model_server"):
        loaded = load(tmp_path)
    assert type(loaded) is runner
    assert loaded.traits.keeps_state == (runner is StatefulRunner)
    [line] = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Runner ")]
    assert f"serves {model_type}, checked in" in line


@pytest.mark.long
def test_a_native_family_imports_neither_transformers_nor_an_image_library(tmp_path: Path) -> None:
    tiny_checkpoint("llama", tmp_path, with_tokenizer=False)
    script = (
        "import sys, torch; from pathlib import Path\n"
        "from support.loading import load\n"
        "import model_server.shard\n"
        "load(Path(sys.argv[1]))\n"
        "assert 'transformers' not in sys.modules\n"
        "assert 'PIL' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=120, env=child_environment())


def test_the_repository_s_code_runs_only_when_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, mark = tmp_path / "model", tmp_path / "mark"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    type_checkpoint("llama", folder)
    (folder / "trap.py").write_text(BOOBY_TRAP.format(mark=str(mark)))
    change_config(
        folder,
        model_type="trap",
        auto_map={"AutoConfig": "trap.TrapConfig", "AutoModelForCausalLM": "trap.TrapModel"},
    )
    with pytest.raises(StartupError, match=r"model type trap needs code from its repository.*--trust-remote-code"):
        load(folder)
    assert not mark.exists()
    assert isinstance(load(folder, trust_remote_code=True), TransformersRunner)
    assert mark.exists()


def test_a_type_that_transformers_knows_needs_no_code_from_its_repository(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    type_checkpoint("olmo", tmp_path)
    (tmp_path / "trap.py").write_text(BOOBY_TRAP.format(mark=str(mark)))
    change_config(tmp_path, auto_map={"AutoConfig": "trap.TrapConfig", "AutoModelForCausalLM": "trap.TrapModel"})
    assert isinstance(load(tmp_path), TransformersRunner)
    assert not mark.exists()


def test_refusals_name_the_cause(tmp_path: Path) -> None:
    type_checkpoint("olmo", tmp_path)
    change_config(tmp_path, model_type="no_such_type")
    with pytest.raises(StartupError, match="Unsupported model type no_such_type"):
        load(tmp_path)
    change_config(tmp_path, model_type="vit")
    with pytest.raises(StartupError, match="vit is not one that generates text"):
        load(tmp_path)


def test_missing_tensors_are_not_made_up(tmp_path: Path) -> None:
    model = type_model("olmo")
    weights = model.state_dict()
    weights.pop("model.layers.2.mlp.up_proj.weight")
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(StartupError, match=r"lack 1 tensors, the first is model.layers.2.mlp.up_proj.weight"):
        load(tmp_path)


def test_a_model_that_sees_the_future_is_refused(tmp_path: Path) -> None:
    type_checkpoint("bert", tmp_path, is_decoder=False)
    with pytest.raises(StartupError, match="bert cannot be served"):
        load(tmp_path)


def test_a_model_of_pictures_alone_is_refused(tmp_path: Path) -> None:
    type_checkpoint("blip", tmp_path)
    with pytest.raises(StartupError, match="blip generates nothing from text alone: it reads `pixel_values`"):
        load(tmp_path)


def test_a_model_that_makes_no_text_is_refused_before_its_weights(tmp_path: Path) -> None:
    type_config("musicgen").save_pretrained(tmp_path)
    save_file({"weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(StartupError, match="musicgen cannot be served: it makes sound"):
        load(tmp_path)


def test_weights_of_towers_are_freed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    type_checkpoint("paddleocr_vl", tmp_path)
    runner = load(tmp_path)
    assert isinstance(runner, TransformersRunner)
    sizes = {name: one.numel() for name, one in runner.model.named_parameters()}
    assert {size for name, size in sizes.items() if "visual" in name} == {0}
    assert all(size for name, size in sizes.items() if "language_model" in name)
    assert "Only the text model of paddleocr_vl is served" in caplog.text


def test_a_text_model_of_its_own_family_in_a_vision_model(tmp_path: Path) -> None:
    """Ministral 3 is published as a mistral3 with another text model than the older ones."""
    fields = type_config("ministral3").to_dict()
    case = make_case("mistral3", tmp_path, text_config=fields)
    runner = load(tmp_path)
    assert isinstance(runner, Decoder)
    assert_equal_logits(run_protocol(runner, case.sequences, 4), case.logits)


def test_a_window_that_only_the_mask_knows_of_is_noticed(tmp_path: Path) -> None:
    """phimoe's attention is not told of its window; in sequences shorter than it nothing would show."""
    type_checkpoint("phimoe", tmp_path, sliding_window=100)
    assert isinstance(load_from_library(tmp_path), StatefulRunner)


def test_a_rope_factor_for_a_model_of_the_library_is_refused(tmp_path: Path) -> None:
    type_checkpoint("olmo", tmp_path)
    with pytest.raises(StartupError, match="--rope-scaling is not served for olmo: set it in the model's config"):
        load(tmp_path, rope_factor=2.0)


def test_a_rope_factor_is_as_if_the_config_named_it(tmp_path: Path) -> None:
    """Down to the table that the runner rotates by."""
    tiny_checkpoint("llama", tmp_path)

    def table(runner: Runner) -> torch.Tensor:
        assert isinstance(runner, Decoder)
        return runner._rotaries[0].rotations(torch.arange(8), 8).table[:8]

    asked = load(tmp_path, rope_factor=3.0)
    plain = table(load(tmp_path))
    theta = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]["rope_theta"]
    change_config(tmp_path, rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": theta})
    assert torch.equal(table(asked), table(load(tmp_path)))
    assert not torch.equal(table(asked), plain)
