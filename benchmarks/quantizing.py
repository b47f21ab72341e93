"""`model-server quantize` beside gptqmodel on the same samples: `python -m benchmarks.quantizing MODEL TEXT`.

MODEL is a folder with a plain checkpoint, TEXT a file. Each row of the table has the perplexity of the same held-out
text, computed by transformers in float32 with the matrices that were written, and the processor time that writing took.
`--gptqmodel PYTHON`: a Python with gptqmodel, such as `make test-quantizers` leaves in
`build/quantizers/gptqmodel-.../bin/python`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model_server.quantize.samples import Samples, from_file
from model_server.text.tokenizer import Tokenizer

BITS, GROUP, SEED = 4, 128, 0
OURS: dict[str, list[str]] = {"defaults": [], "--act-order": ["--act-order"]}
THEIRS: dict[str, dict[str, object]] = {"defaults": {}, "desc_act": {"desc_act": True}, "mse": {"mse": 2.4}}
GPTQMODEL = Path(__file__).with_name("quantizing_gptqmodel.py")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantizing", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--num-samples", type=int, default=128)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--gptqmodel", type=Path, metavar="PYTHON")
    parser.add_argument("--held-out", type=int, default=16, help="windows of the text's end")
    asked = parser.parse_args()
    samples = from_file(
        asked.text, Tokenizer.load(asked.model), count=asked.num_samples, length=asked.sequence_length, seed=SEED
    )
    rows = [("the model itself", perplexity(asked, None), 0.0)]
    with tempfile.TemporaryDirectory(prefix="quantizing-") as root:
        rows += made(asked, samples, Path(root))
    print(f"{BITS} bits, groups of {GROUP}, {asked.num_samples} samples of {asked.sequence_length} tokens")
    for name, found, seconds in rows:
        print(f"| {name} | {found:.3f} | {seconds:.0f} s |")


def made(asked: argparse.Namespace, samples: Samples, root: Path) -> Iterator[tuple[str, float, float]]:
    for name, options in OURS.items():
        out = root / f"ours-{name}"
        command = [sys.executable, "-m", "model_server", "quantize", str(asked.model), str(out), *options]
        command += [
            "--groupsize",
            str(GROUP),
            "--bits",
            str(BITS),
            "--calibration",
            str(asked.text),
            "--seed",
            str(SEED),
        ]
        command += ["--num-samples", str(asked.num_samples), "--sequence-length", str(asked.sequence_length)]
        yield f"model-server quantize, {name}", *tried(asked, command, out)
    if asked.gptqmodel is None:
        return
    ids = root / "ids.safetensors"
    save_file({"calibration": samples.calibration}, ids)
    for name, fields in THEIRS.items():
        out = root / f"gptqmodel-{name}"
        how = json.dumps({"bits": BITS, "group_size": GROUP, **fields})
        command = [str(asked.gptqmodel), str(GPTQMODEL), str(ids), str(asked.model), str(out), how]
        yield f"gptqmodel, {name}", *tried(asked, command, out)


def tried(asked: argparse.Namespace, command: list[str], out: Path) -> tuple[float, float]:
    """Perplexity, and seconds of processor time."""
    before = _cpu_s()
    subprocess.run(command, check=True, stdout=sys.stderr, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    return perplexity(asked, out), _cpu_s() - before


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@torch.inference_mode()
def perplexity(asked: argparse.Namespace, quantized: Path | None) -> float:
    """Of the last windows of the text, which are within what no sample is of."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.float32, local_files_only=True)
    if quantized is not None:
        replace_matrices(model, quantized)
    ids = torch.tensor(Tokenizer.load(asked.model).encode(asked.text.read_text(), truncate=0, add_special_tokens=True))
    length = asked.sequence_length
    windows = ids[-min(asked.held_out, len(ids) // 10 // length) * length :].view(-1, length)
    loss = 0.0
    for window in windows:
        logits = model(window[None]).logits[0, :-1]
        loss += float(torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum"))
    return math.exp(loss / windows[:, 1:].numel())


def replace_matrices(model: Any, folder: Path) -> None:
    """By those of a gptq checkpoint of the first format."""
    stored: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        stored |= load_file(path)
    modules = dict(model.named_modules())
    for name in [name.removesuffix(".qweight") for name in stored if name.endswith(".qweight")]:
        matrix = dequantized(*(stored[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales", "g_idx")))
        modules[name].weight.copy_(matrix)


def dequantized(codes: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor) -> Tensor:
    """[out, in] float32."""
    shifts = torch.arange(0, 32, BITS)
    mask = (1 << BITS) - 1
    unpacked = ((codes[:, None] >> shifts[None, :, None]) & mask).reshape(-1, codes.shape[1])
    offsets = ((zeros[:, :, None] >> shifts) & mask).reshape(len(zeros), -1) + 1
    where = groups.long()
    return ((unpacked - offsets[where]) * scales.float()[where]).t()


if __name__ == "__main__":
    main()
