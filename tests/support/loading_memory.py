"""How much anonymous memory a rank takes while it loads, measured from outside on a checkpoint of a chosen size.

The checkpoint is a llama of few layers and large matrices, sharded over several files with an index: what is held
beside the weights while they are read shows best there. The rank is a process of its own that loads and does no more.
"""

from __future__ import annotations

import json
import math
import selectors
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SAMPLE_S = 0.002
_FIELDS = {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4}


_QUANTIZATION = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


@dataclass(frozen=True, slots=True)
class Growth:
    """Bytes of anonymous memory above what the process had before it began to load; times in seconds."""

    share: int  # the rank's own weights
    peak: int
    end: int
    seconds: float

    @property
    def ratio(self) -> float:
        return self.peak / self.share


def write_checkpoint(
    folder: Path,
    megabytes: int,
    *,
    dtype: str = "float32",
    files: int = 4,
    method: str | None = None,
    inner: int = 5632,
) -> Path:
    """A sharded llama checkpoint of about that size in `folder`; values are small random numbers.

    method: `gptq` (4 bits, groups of 128) or `fp8` (blocks of 128 x 128): how the layers' matrices are stored.
    inner: the width of the MLPs.
    """
    import torch
    from safetensors.torch import save_file

    width = _FIELDS["hidden_size"]
    keys = width // _FIELDS["num_attention_heads"] * _FIELDS["num_key_value_heads"]
    itemsize = getattr(torch, dtype).itemsize
    per_weight = {"gptq": 0.5, "fp8": 1.0}.get(method or "", itemsize)
    per_layer = (2 * width * width + 2 * keys * width + 3 * inner * width) * per_weight
    vocab_size = 8192
    budget = megabytes * 10**6 - 2 * vocab_size * width * itemsize
    num_layers = max(round(budget / per_layer), 2)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab_size, width),
        "lm_head.weight": (vocab_size, width),
        "model.norm.weight": (width,),
    }
    for index in range(num_layers):
        layer = {
            "self_attn.q_proj": (width, width),
            "self_attn.k_proj": (keys, width),
            "self_attn.v_proj": (keys, width),
            "self_attn.o_proj": (width, width),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
        }
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        **_FIELDS, "intermediate_size": inner, "model_type": "llama", "num_hidden_layers": num_layers,
        "vocab_size": vocab_size, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "dtype": dtype, "architectures": ["LlamaForCausalLM"],
    }  # fmt: skip
    if method is not None:
        config["quantization_config"] = _QUANTIZATION[method]
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(2**20, generator=generator).mul_(0.02).to(getattr(torch, dtype))
    weight_map: dict[str, str] = {}
    names = list(shapes)
    for number in range(files):
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        tensors = {}
        for name in names[number::files]:
            tensors |= _stored(name, shapes[name], block, method)
        weight_map |= dict.fromkeys(tensors, file)
        save_file(tensors, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def _stored(name: str, shape: tuple[int, ...], block: Any, method: str | None) -> dict[str, Any]:
    """The tensors of one matrix or vector. block: numbers that are repeated."""
    import torch

    def repeated(numbers: Any, *size: int) -> Any:
        count = math.prod(size)
        return numbers.repeat(-(-count // numbers.numel()))[:count].view(size).clone()

    if method is None or ".layers." not in name or len(shape) == 1:
        return {name: repeated(block, *shape)}
    (rows, columns), module = shape, name.removesuffix(".weight")
    if method == "fp8":
        codes = repeated((block * 50).to(torch.float8_e4m3fn).view(torch.uint8), *shape)
        scales = torch.full((-(-rows // 128), -(-columns // 128)), 0.02)
        return {name: codes.view(torch.float8_e4m3fn), f"{module}.weight_scale_inv": scales}
    words = block.float().view(torch.int32)
    return {
        f"{module}.qweight": repeated(words, columns // 8, rows),
        f"{module}.qzeros": torch.full((columns // 128, rows // 8), 0x77777777, dtype=torch.int32),
        f"{module}.scales": torch.full((columns // 128, rows), 0.003, dtype=torch.float16),
        f"{module}.g_idx": (torch.arange(columns) // 128).int(),
    }


def measure(
    folder: Path, *, rank: int = 0, world_size: int = 1, dtype: str = "float32", quantize: str | None = None
) -> Growth:
    """Load this rank's part in a process of its own and watch it. quantize: `--quantize`."""
    command = [sys.executable, "-m", "support.loading_memory", str(folder), str(rank), str(world_size), dtype]
    command += [] if quantize is None else [quantize]
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[1], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        _expect(process.stdout.readline(), "ready")
        base = peak = _anonymous(process.pid)
        process.stdin.write("\n")
        process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not selector.select(SAMPLE_S):
                peak = max(peak, _resident_anonymous(process.pid))
        report: dict[str, Any] = json.loads(process.stdout.readline() or "{}")
        if not report:
            raise AssertionError("the rank ended before it had loaded")
        end = _anonymous(process.pid)
        process.stdin.close()
    return Growth(report["share"], max(peak, end) - base, end - base, report["seconds"])


def _expect(line: str, word: str) -> None:
    if line.strip() != word:
        raise AssertionError(f"the rank said {line!r}")


def _anonymous(pid: int) -> int:
    """Exact, but it walks the page tables: for the quiet moments."""
    return _field(Path(f"/proc/{pid}/smaps_rollup"), "Anonymous:")


def _resident_anonymous(pid: int) -> int:
    return _field(Path(f"/proc/{pid}/status"), "RssAnon:")


def _field(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return 0


def _load(folder: Path, rank: int, world_size: int, dtype: str, quantize: str | None = None) -> None:
    import torch

    from model_server.attention.choice import AttentionChoice
    from model_server.device import resolve_dtype, tune
    from model_server.distributed.group import ProcessGroup
    from model_server.distributed.layout import Ranks
    from model_server.distributed.placement import Placement
    from model_server.layers.linear.onednn import weight_packer
    from model_server.models.load import load_runner
    from model_server.models.model import describe
    from model_server.weights.checkpoint import examine

    group = ProcessGroup()
    group.rank, group.size = rank, world_size  # loading needs no word from the others
    device = torch.device("cpu")
    number_type = resolve_dtype(dtype, device)
    tune(device, world_size, 2**30)
    weight_packer(device, number_type)  # what a first product brings into the process is not the weights'
    torch.randn(512, 512) @ torch.randn(512, 512)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    started = time.perf_counter()
    placement = Placement(device, number_type, Ranks.of(group))
    runner = load_runner(
        describe(examine(folder), quantize=quantize), placement, AttentionChoice(None, device, number_type)
    )
    report = {"share": runner.traits.weight_bytes, "seconds": time.perf_counter() - started}
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()
    sys.stdin.readline()
    del runner


if __name__ == "__main__":
    _load(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
