"""Pictures for models with layers of cross attention: prepared as the router does, and by transformers' processors."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from support.cross_models import write_cross_checkpoint
from support.engine_shard import EngineShard
from support.loading import load
from support.pictures import picture, pixels

from model_server.features.images.encoder import ImageEncoder
from model_server.features.images.families import FAMILIES
from model_server.features.images.image import Feature, Image, ImagePlace
from model_server.features.images.tower import CrossTower
from model_server.models.hf.loading import quiet
from model_server.models.hf.stateful import StatefulRunner
from model_server.text.tokenizer import Tokenizer
from wire.images import families
from wire.images.preparing import Preparer

NEW_TOKENS = 12
SIZES = ((40, 90), (120, 60), (56, 56), (30, 200))
# Sizes of the pictures between the texts; the same text, and with it the same pictures in another order.
PROMPTS: tuple[tuple[tuple[int, ...], str], ...] = (
    ((), "once upon a time"),
    ((0,), "what is {} this?"),
    ((1,), "what is {} this?"),
    ((0, 1), "{}first and {}second"),
    ((2, 3, 0), "these {}{} and</s> that{} the end"),
)


class CrossScene:
    """One tiny model: transformers' own with its processor, and ours."""

    def __init__(self, folder: Path, name: str) -> None:
        from transformers import AutoImageProcessor, PreTrainedTokenizerFast
        from transformers.models.idefics.processing_idefics import IdeficsProcessor
        from transformers.models.mllama.processing_mllama import MllamaProcessor

        quiet()
        self.name, self.folder = name, folder
        self.model = write_cross_checkpoint(folder, name)
        self.family = families.FAMILIES[name]
        self.tokenizer = Tokenizer.load(folder)
        self.preparer = Preparer(folder, "float32")
        words = PreTrainedTokenizerFast.from_pretrained(folder)
        images: Any = AutoImageProcessor.from_pretrained(folder, backend="pil")
        kind: Any = MllamaProcessor if name == "mllama" else IdeficsProcessor
        self.processor = kind(images, words)

    @cached_property
    def runner(self) -> Any:
        return load(self.folder)

    def shard(self) -> EngineShard:
        assert isinstance(self.runner, StatefulRunner)
        tower = CrossTower(self.runner, FAMILIES[self.name], self.tokenizer)
        return EngineShard(self.tokenizer, runner=self.runner, encoder=ImageEncoder(tower, 10_000), num_blocks=256)

    def prompt(self, numbers: tuple[int, ...], text: str) -> tuple[list[int], tuple[ImagePlace, ...]]:
        """Token ids, and where the pictures are."""
        prepared = [self.preparer.prepare(bytes([n]) * 32, picture(*SIZES[n], n), max_pixels=10**6) for n in numbers]
        whole = self.family.arrange(text.format(*(one.expansion for one in prepared)), "<s>")
        ids = self.tokenizer.encode(whole, truncate=0, add_special_tokens=True)
        tower = CrossTower(self.runner, FAMILIES[self.name], self.tokenizer)
        where = [place for place, token in enumerate(ids) if token == tower.image_token]
        places = []
        for place, one in zip(where, prepared, strict=True):
            features = {name: Feature(f.dtype, f.shape, f.data) for name, f in one.features.items()}
            places.append(ImagePlace(one.key, place, 1, Image(one.key, features, one.num_embeds)))
        return ids, tuple(places)

    def generate(self, numbers: tuple[int, ...], text: str, ids: list[int], new_tokens: int = NEW_TOKENS) -> list[int]:
        """transformers' answer, by its own processor, which must read the same token ids."""
        shown = [pixels(*SIZES[n], n) for n in numbers]
        if self.name == "mllama":
            whole = "<s>" + text.format(*["<|image|>"] * len(numbers))
            pictures = {"images": [shown]} if shown else {}
            read = self.processor(text=[whole], add_special_tokens=False, return_tensors="pt", **pictures)
        else:
            texts = text.split("{}")
            parts = [texts[0]]
            for one, after in zip(shown, texts[1:], strict=True):
                parts += [one, after]
            parts = [part for part in parts if not isinstance(part, str) or part]
            read = self.processor(text=[parts], return_tensors="pt")
        assert read["input_ids"][0].tolist() == ids
        with torch.inference_mode():
            out = self.model.generate(
                **read, do_sample=False, max_new_tokens=new_tokens, min_new_tokens=new_tokens, eos_token_id=None
            )
        return [int(i) for i in out[0, len(ids) :]]
