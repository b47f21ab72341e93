"""The options of `model-server quantize`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from model_server.errors import StartupError
from wire.cli.options import argument, option


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
    """`model-server quantize MODEL_ID OUTPUT_DIR`: rounds the matrices of a checkpoint by GPTQ."""

    model_id: str = argument(help="Hub id of the model, or a local folder")
    output_dir: Path = argument(help="Folder for the quantized model; an interrupted run continues in it")
    revision: str | None = option(None, env=None, help="Branch, tag or commit")
    logger_level: str = option("INFO", env=None, panel="Operation", help="Least severe log level that is written")
    json_output: bool = option(
        False, env=None, negatable=True, panel="Operation", help="One JSON object for each log line"
    )
    trust_remote_code: bool = option(
        False, env=None, negatable=True, help="No effect: only models that need no code of their own are quantized"
    )
    upload_to_model_id: str | None = option(None, env=None, help="Hub repository to which the result is uploaded, too")
    percdamp: float = option(
        0.01, env=None, help="Damping: this share of the Hessian's mean diagonal is added to its diagonal"
    )
    act_order: bool = option(False, env=None, negatable=True, help="Round columns by falling activations")
    groupsize: int = option(128, env=None, help="Columns that share a scale; -1: all of a row")
    bits: int = option(4, env=None, help="Bits of a weight, 4 or 8")
    calibration: Path | None = option(
        None,
        env=None,
        help="Text, or JSON lines with a field `text`, on which the model is calibrated; without it the model writes "
        "samples of 512 tokens itself",
    )
    num_samples: int = option(128, env=None, help="Samples of the calibration")
    sequence_length: int = option(2048, env=None, help="Tokens of a sample of the calibration file")
    seed: int = option(0, env=None, help="Chooses the samples")
    resume: bool = option(True, env=None, negatable=True, help="Continue an interrupted run")


def check_quantize(config: QuantizeConfig) -> None:
    """Refuse what no model can be quantized with.

    Raises:
        StartupError: An option is out of its range.
    """
    if config.bits not in (4, 8):
        raise StartupError(f"--bits {config.bits}: choose 4 or 8")
    if config.groupsize != -1 and (config.groupsize < 16 or config.groupsize % 8):
        raise StartupError(f"--groupsize {config.groupsize}: give a multiple of 8 from 16 on, or -1 for whole rows")
    if not config.percdamp > 0:
        raise StartupError(f"--percdamp {config.percdamp:g}: give a number above 0")
    if config.num_samples < 1 or config.sequence_length < 2:
        raise StartupError("--num-samples must be at least 1, and --sequence-length at least 2")
