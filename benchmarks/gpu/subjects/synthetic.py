"""Models without a hub: weights made on the device from a seed, a tokenizer with as many tokens as the vocabulary.

Matrices are normal with deviation 0.02, norms 1 ± 0.1, never zeros or constants: a card is faster on those than in use.
The head is eight times as large, so that greedy choices are decisive.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from benchmarks.gpu.subjects.shapes import Shape
from model_server.attention.backend import AttentionBackend
from model_server.attention.choice import AttentionChoice
from model_server.distributed.group import ProcessGroup
from model_server.distributed.layout import Ranks
from model_server.distributed.placement import Placement
from model_server.models.decoder.build import build
from model_server.models.decoder.decoder import Decoder
from model_server.text.tokenizer import Tokenizer
from model_server.weights.reader import Range

DEVIATION = 0.02
HEAD_FACTOR = 8.0
FILE_BYTES = 4 * 2**30
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class RandomReader:
    """A `WeightReader` over tensors that are made when they are asked for: the same name and seed, the same numbers."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self._shapes = shape.tensors()
        self._head = "model.embed_tokens.weight" if shape.tied else "lm_head.weight"
        self.device = device
        self._seed = seed
        self.dtype = dtype

    def has(self, name: str) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def stored(self, name: str) -> str:
        return "F32"

    def skip(self, *names: str) -> None:
        """Nothing keeps count of what is read."""

    def tensor(self, name: str) -> Tensor:
        """The whole tensor."""
        shape = self._shapes[name]
        generator = torch.Generator(self.device).manual_seed(self._seed ^ zlib.crc32(name.encode()))
        made = torch.empty(shape, dtype=self.dtype, device=self.device)
        if len(shape) == 1:
            return made.uniform_(0.9, 1.1, generator=generator)
        return made.normal_(0.0, DEVIATION * (HEAD_FACTOR if name == self._head else 1.0), generator=generator)

    def rows(self, name: str, ranges: Sequence[Range], dtype: torch.dtype | None = None) -> Tensor:
        whole = self.tensor(name)
        rows = whole if list(ranges) == [(0, len(whole))] else torch.cat([whole[a:b] for a, b in ranges])
        return rows if dtype is None else rows.to(dtype)

    def fill(
        self,
        out: Tensor,
        name: str,
        rows: Sequence[Range],
        columns: Range | None = None,
        *,
        index: int | None = None,
        place: Callable[[Tensor, Tensor], object] = Tensor.copy_,
        unit: int = 1,
    ) -> None:
        """All rows at once: whole groups of `unit` in any case."""
        whole = self.tensor(name) if index is None else self.tensor(name)[index]
        chosen = whole if list(rows) == [(0, len(whole))] else torch.cat([whole[a:b] for a, b in rows])
        place(out, chosen if columns is None else chosen[:, slice(*columns)])


def make_decoder(
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    attention: AttentionBackend | None = None,
    group: ProcessGroup | None = None,
) -> Decoder:
    """The native decoder of a shape. attention: None, the one that serves on this device."""
    backend = attention or AttentionChoice(None, device, dtype).for_layers()
    reader = RandomReader(shape, device, dtype, seed)
    with torch.inference_mode():
        return build(shape.spec, reader, Placement(device, dtype, Ranks.of(group or ProcessGroup())), backend)


def make_transformers(shape: Shape, device: torch.device, dtype: torch.dtype, *, seed: int = 0, **options: Any) -> Any:
    """transformers' Llama with the same weights. options: `attn_implementation`."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    if shape.experts:
        raise ValueError("transformers keeps experts in another layout: compare dense shapes")
    fields = {k: v for k, v in shape.config.items() if k not in ("model_type", "architectures")}
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(LlamaConfig(**fields), dtype=dtype, **options).eval()
    finally:
        torch.set_default_dtype(before)
    reader = RandomReader(shape, device, dtype, seed)
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name in shape.tensors():
            own[name].copy_(reader.tensor(name))
    return model


def make_tokenizer(vocab: int) -> tokenizers.Tokenizer:
    """Byte-level, without merges: every letter of a prompt is one token; every other id is a word of its own."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = ["<s>", "</s>", *bytes_]
    texts += ["Ġ" + _word(i) for i in range(vocab - len(texts))]
    backend = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(texts[:vocab])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def _word(number: int) -> str:
    """Two letters and more, each number its own."""
    text = ""
    number += len(LETTERS)
    while number >= 0:
        number, last = divmod(number, len(LETTERS))
        text = LETTERS[last] + text
        number -= 1
    return text


def engine_tokenizer(vocab: int) -> Tokenizer:
    """The same as the model server's."""
    return Tokenizer(make_tokenizer(vocab), eos_token_ids=frozenset({1}), special_tokens=("<s>", "</s>"))


def write_checkpoint(shape: Shape, folder: Path, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Path:
    """Files as of a downloaded model: config, sharded safetensors, tokenizer. Best on a file system in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    name = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(shape.config | {"dtype": name}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "bos_token_id": 0}))
    settings = {"model_max_length": shape.positions, "bos_token": "<s>", "eos_token": "</s>"}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    make_tokenizer(shape.vocab).save(str(folder / "tokenizer.json"))
    reader = RandomReader(shape, device, dtype, seed)
    files: list[dict[str, Tensor]] = [{}]
    held = 0
    index: dict[str, int] = {}
    for tensor_name in shape.tensors():
        tensor = reader.tensor(tensor_name).cpu()
        if held + tensor.nbytes > FILE_BYTES and files[-1]:
            _save(folder, files, len(files))
            files[-1] = {}
            files.append({})
            held = 0
        files[-1][tensor_name] = tensor
        index[tensor_name] = len(files)
        held += tensor.nbytes
    _save(folder, files, len(files))
    weight_map = {name: _file(number) for name, number in index.items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def _save(folder: Path, files: list[dict[str, Tensor]], number: int) -> None:
    save_file(files[-1], folder / _file(number), metadata={"format": "pt"})


def _file(number: int) -> str:
    return f"model-{number:05}.safetensors"
