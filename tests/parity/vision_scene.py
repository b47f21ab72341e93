"""Prompts with pictures: through an engine on a tiny vision model, and through transformers' whole model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.engine_shard import BLOCK, EngineShard, slots_of
from support.loading import CPU, load
from support.vision_models import END, IMAGE, START, write_vision_checkpoint

from model_server.batch.sequence import NewRequest
from model_server.features.images.encoder import ImageEncoder
from model_server.features.images.families import vision_family
from model_server.features.images.image import AskedImages, Feature, Image, ImagePlace
from model_server.features.images.tower import load_tower
from model_server.models.hf.loading import quiet
from model_server.text.tokenizer import Tokenizer
from wire.images.borders import chunk_end
from wire.images.gemma4_unified import gemma4_unified_processor
from wire.images.llama4 import Llama4Processor
from wire.model_files import read_config

NEW_TOKENS = 12
FEATURES = ("pixel_values", "image_sizes", "pixel_attention_mask", "image_grid_thw", "image_position_ids")
# Families whose processor transformers has for torchvision only.
OWN_PROCESSORS: dict[str, Callable[[Path], Any]] = {
    "gemma4_unified": gemma4_unified_processor, "llama4": Llama4Processor.from_folder,
}  # fmt: skip
# Whose tokens of one image see each other.
SEEING = ("gemma3", "gemma4", "gemma4_unified")
NESTED = ("idefics2", "idefics3", "smolvlm")
# Families whose image tokens are one run.
WHOLE_RUNS = (
    "gemma3", "gemma4", "gemma4_small", "gemma4_unified", "paligemma", "paligemma2", "qwen2_vl", "qwen2_5_vl",
    "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "qwen2_5_omni_thinker",
    "qwen3_omni_moe_thinker", "glm4v", "glm46v", "glm4v_moe",
)  # fmt: skip


def picture(number: int) -> Any:
    """A drawn picture, each of another size."""
    from PIL import Image as Pil
    from PIL import ImageDraw

    width, height = ((120, 80), (70, 100), (60, 60), (240, 200))[number % 4]
    drawn = Pil.new("RGB", (width, height), (40 * number % 256, 200 - 50 * number, 90))
    draw = ImageDraw.Draw(drawn)
    draw.ellipse((5, 10, 35 + 10 * number, 50), fill=(250, 30 * number, 10))
    draw.rectangle((30, 5 + 20 * (number % 3), 55, 55), fill=(10, 60, 240))
    return drawn


@dataclass(frozen=True)
class Prompt:
    """ids, where pictures stand in them, and which."""

    ids: list[int]
    places: list[ImagePlace]
    pictures: list[int]


class VisionScene:
    """One tiny model: transformers' own, and what the engine needs of it."""

    def __init__(self, folder: Path, name: str) -> None:
        from transformers import AutoImageProcessor

        quiet()
        self.name = name
        self.folder = folder
        self.model = write_vision_checkpoint(folder, name)
        own = OWN_PROCESSORS.get(name)
        self.processor: Any = own(folder) if own else AutoImageProcessor.from_pretrained(folder, backend="pil")

    @cached_property
    def tower(self) -> Any:
        family = vision_family(read_config(self.folder / "config.json", ValueError))
        assert family is not None
        with torch.inference_mode():
            return load_tower(self.folder, self.name, family, CPU, torch.float32)

    def process(self, numbers: Sequence[int]) -> dict[str, Any]:
        """What the processor makes of these pictures together, as arrays."""
        drawn: Any = [picture(number) for number in numbers]
        if self.name == "llama4":
            tiles = [self.processor([np.asarray(one)])["pixel_values"] for one in drawn]
            return {"pixel_values": np.concatenate(tiles)}
        made = self.processor(
            images=[drawn] if self.name in NESTED else drawn, return_tensors="np", input_data_format="channels_last"
        )
        return {name: np.asarray(value) for name, value in made.items() if name in FEATURES}

    def image(self, number: int) -> Image:
        """Picture `number` as the router prepares it."""
        arrays = self.process([number])
        features = {n: Feature(str(a.dtype), a.shape, np.ascontiguousarray(a).tobytes()) for n, a in arrays.items()}
        with torch.inference_mode():
            tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
            read = getattr(self.model, "get_image_features", None) or self.model.model.get_image_features
            made = read(**tensors, return_dict=True)
            found = made.last_hidden_state if self.name == "llama4" else made.pooler_output
        rows = sum(part[..., 0].numel() for part in ([found] if isinstance(found, torch.Tensor) else found))
        grid: tuple[int, ...] = ()
        if "image_grid_thw" in arrays:
            t, h, w = arrays["image_grid_thw"][0].tolist()
            grid = (t, h // 2, w // 2)
        return Image(hashlib.sha256(f"{self.name} {number}".encode()).digest(), features, rows, grid)

    def prompt(self, numbers: Sequence[int], *, first_length: int = 5) -> Prompt:
        """Pictures with text before, between and behind them."""
        generator = np.random.default_rng(len(numbers))
        ids = [0, *generator.integers(3, 300, first_length).tolist()]
        places = []
        for number in numbers:
            image = self.image(number)
            run = [IMAGE] * image.num_embeds
            if self.name not in WHOLE_RUNS:
                run.insert(len(run) // 3, END)
            span = [START, *run, END]
            places.append(ImagePlace(image.key, len(ids), len(span), image))
            ids += [*span, *generator.integers(3, 300, 4).tolist()]
        return Prompt(ids, places, list(numbers))

    def first_chunk(self, prompt: Prompt, length: int) -> int:
        """The router's first chunk, of about `length` tokens."""
        whole = [(p.start, p.stop) for p in prompt.places] if self.name in SEEING else []
        return chunk_end(0, min(length, len(prompt.ids)), whole)

    def generate(self, prompt: Prompt, new_tokens: int = NEW_TOKENS) -> list[int]:
        """transformers' greedy answer."""
        return self.answer(prompt, new_tokens)[0]

    def answer(self, prompt: Prompt, new_tokens: int = NEW_TOKENS) -> tuple[list[int], torch.Tensor]:
        """And the logits that its tokens were taken from, [new_tokens, vocab_size]."""
        ids = torch.tensor([prompt.ids])
        more: dict[str, Any] = {}
        if prompt.pictures:
            more = {name: torch.from_numpy(array) for name, array in self.process(prompt.pictures).items()}
        if self.name.startswith(("qwen", "glm", "gemma4")) and "omni" not in self.name:
            more["mm_token_type_ids"] = (ids == IMAGE).int()
        if self.name in ("gemma3", "paligemma", "paligemma2"):
            more["token_type_ids"] = (ids == IMAGE).long() if self.name == "gemma3" else torch.zeros_like(ids)
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens,
                min_new_tokens=new_tokens, eos_token_id=None, output_logits=True, return_dict_in_generate=True, **more,
            )  # fmt: skip
        return [int(i) for i in out.sequences[0, len(prompt.ids) :]], torch.cat(out.logits)

    def encoder(self, capacity: int = 10_000) -> ImageEncoder:
        return ImageEncoder(self.tower, capacity)

    def shard(
        self,
        *,
        budget: int = 10_000,
        encoder: ImageEncoder | None = None,
        num_blocks: int = 256,
        folder: Path | None = None,
        runner: Any = None,
        **options: Any,
    ) -> EngineShard:
        """An engine on the model. folder: of another text model. options: for `load`. runner: instead of a new one."""
        runner = runner or load(folder or self.folder, **options)
        return EngineShard(
            Tokenizer.load(self.folder), budget=budget, runner=runner, encoder=encoder or self.encoder(),
            num_blocks=num_blocks,
        )  # fmt: skip


def request(shard: EngineShard, prompt: Prompt, new_tokens: int = NEW_TOKENS, **changes: Any) -> NewRequest:
    return shard.request(prompt.ids, new_tokens, asked=(AskedImages(tuple(prompt.places)),), **changes)


__all__ = ["BLOCK", "NEW_TOKENS", "Prompt", "VisionScene", "picture", "request", "slots_of"]
