"""What every writer needs: tiny models, texts to calibrate with, and the library's own reading in plain matrices.

Runs in a library's environment, which has torch and transformers beside it, and nothing of this project.
"""

from __future__ import annotations

import json
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

VOCABULARY = 512
PROMPTS, PROMPT, GENERATED = 2, 24, 12
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": False},  # biases of queries, keys and values
    "starcoder2": {"hidden_act": "gelu_pytorch_tanh", "sliding_window": None, "use_bias": True},  # biases everywhere
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "decoder_sparse_step": 1},
}

# A function that writes a checkpoint to a folder and returns the library's reading of it: logits of ids [1, length].
Write = Callable[[Path], Callable[[Tensor], Tensor]]


def plain_model(kind: str, dtype: torch.dtype = torch.bfloat16, **fields: Any) -> Any:
    """A model with random weights, large enough that a lost scale or bias changes tokens."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **KINDS.get(kind, {}), **fields})
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            _ = parameter.copy_(noise * 0.1) if parameter.dim() >= 2 else parameter.add_(noise * 0.1)
    return model.to(dtype).eval()


def plain_folder(folder: Path, kind: str, dtype: torch.dtype = torch.bfloat16, **fields: Any) -> Path:
    """`folder`, with such a model and its tokenizer."""
    plain_model(kind, dtype, **fields).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def tokenizer() -> Any:
    """One token for each word `w0` to `w511`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<pad>"
    )


def numbers(count: int, length: int) -> list[dict[str, list[int]]]:
    """Random tokens to calibrate with."""
    ids = torch.randint(3, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "attention_mask": [1] * length} for row in ids.tolist()]


def texts(count: int, length: int) -> list[str]:
    """The same as words."""
    return [" ".join(f"w{one}" for one in row["input_ids"]) for row in numbers(count, length)]


def with_plain_matrices(model: nn.Module, is_quantized: Callable[[nn.Module], bool]) -> Callable[[Tensor], Tensor]:
    """The model's logits in float32, with the matrices that its quantized modules multiply by.

    They are found by multiplying the unit matrix, so that this is the library's arithmetic whatever it stores; where
    it rounds what is multiplied, they are decoded by its own method.
    """
    for name, module in list(model.named_modules()):
        if is_quantized(module):
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, _linear(module))
    return logits_of(model)


def logits_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """In float32."""
    # Not the model's own method, which refuses where matrices were quantized.
    whole: Any = nn.Module.float(model).eval()
    whole.config.dtype = torch.float32
    return lambda ids: whole(ids, use_cache=False).logits.float()


def _linear(module: Any) -> nn.Linear:
    weight = _product(module if hasattr(module, "dequant_weight_online") else module.float())
    bias = getattr(module, "bias", None)
    made = nn.Linear(*reversed(weight.shape), bias=bias is not None)
    made.weight = nn.Parameter(weight)
    if bias is not None:
        made.bias = nn.Parameter(bias.detach().float())
    return made


@torch.no_grad()
def _product(module: Any) -> Tensor:
    """The matrix [out, in]; of arithmetic in float16 where the library has no other."""
    decode = getattr(module, "dequant_weight_online", None)
    if decode is not None:
        decoded: Tensor = decode()
        return decoded.float()
    unit = torch.eye(module.in_features)
    try:
        product = module(unit) - module(unit[:1] * 0)
    except RuntimeError:
        unit = unit.half()
        product = module.half()(unit).float() - module(unit[:1] * 0).float()
    return product.float().T.contiguous()


def write_all(cases: Iterator[tuple[str, Write]]) -> None:
    """Writes each case below the folder that the command line names, with `expected.safetensors` or `error.txt`.

    Further words of the command line name cases: only these are written.
    """
    out, only = Path(sys.argv[1]), sys.argv[2:]
    for name, write in cases:
        if only and name not in only:
            continue
        folder = out / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            save_file(_answers(write(folder)), folder / "expected.safetensors")
        except (Exception, SystemExit) as error:  # whatever the library says of its own option
            traceback.print_exc()
            (folder / "error.txt").write_text(f"{type(error).__name__}: {error}")
        print(name, "failed" if (folder / "error.txt").exists() else "written", flush=True)


@torch.inference_mode()
def _answers(logits: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """`tokens`: prompts and what follows greedily; `logits` of each but the last."""
    ids = torch.randint(3, VOCABULARY, (PROMPTS, PROMPT), generator=torch.Generator().manual_seed(2))
    rows = []
    for row in ids.unsqueeze(1):
        for _ in range(GENERATED):
            row = torch.cat([row, logits(row)[:, -1:].argmax(-1)], dim=1)
        rows.append(row)
    tokens = torch.cat(rows)
    return {"tokens": tokens, "logits": torch.cat([logits(row[:, :-1]) for row in rows]).contiguous()}


def edit_config(folder: Path, **fields: Any) -> None:
    """Changes top-level fields of a config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields, indent=2))
