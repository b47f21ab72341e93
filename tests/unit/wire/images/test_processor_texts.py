"""Prompts of transformers' whole processors, where those load without torchvision: the same text as ours."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from support.pictures import picture, pixels
from support.vision_settings import settings_folder
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoImageProcessor, PreTrainedTokenizerFast
from transformers.models.aya_vision.processing_aya_vision import AyaVisionProcessor
from transformers.models.deepseek_vl.processing_deepseek_vl import DeepseekVLProcessor
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.gemma4_unified.processing_gemma4_unified import Gemma4UnifiedProcessor
from transformers.models.idefics2.processing_idefics2 import Idefics2Processor
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.paligemma.processing_paligemma import PaliGemmaProcessor

from wire.images.expansions import Layout
from wire.images.families import FAMILIES
from wire.images.preparing import Preparer

_LLAVA = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
PROCESSORS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llava": (LlavaProcessor, _LLAVA),
    "llava_next": (LlavaNextProcessor, _LLAVA),
    "idefics2": (Idefics2Processor, {"image_seq_len": 64}),
    "idefics3": (Idefics3Processor, {"image_seq_len": 169}),
    "paligemma": (PaliGemmaProcessor, {}),
    "gemma3": (Gemma3Processor, {"image_seq_length": 256}),
    "aya_vision": (AyaVisionProcessor, {"patch_size": 14, "img_size": 364, "downsample_factor": 2}),
    "deepseek_vl": (DeepseekVLProcessor, {"num_image_tokens": 576}),
}
TOKENS = (
    "<s>", "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<start_of_image>",
    "<image_soft_token>", "<end_of_image>", "[IMG]", "[IMG_BREAK]", "[IMG_END]",
    "<image_placeholder>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)  # fmt: skip


def tokenizer(name: str) -> PreTrainedTokenizerFast:
    bytes_only = Tokenizer(models.BPE())
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytes_only.model = models.BPE(alphabet, [])
    bytes_only.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in TOKENS])
    extra = {"image_token": FAMILIES[name].image_token}
    if name == "gemma3":
        extra |= {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    if name == "idefics2":
        extra |= {"image_boundary_token": "<fake_token_around_image>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, bos_token="<s>", pad_token="<s>", extra_special_tokens=extra
    )


@pytest.mark.parametrize(("name", "kind"), [("gemma4", Gemma4Processor), ("gemma4_unified", Gemma4UnifiedProcessor)])
def test_an_image_is_written_as_by_a_processor_that_needs_torchvision(name: str, kind: Any) -> None:
    family = FAMILIES[name]
    words = SimpleNamespace(image_token=family.image_token, boi_token="<|image>", eoi_token="<image|>")
    written = kind.replace_image_token(words, {"num_soft_tokens_per_image": [3]}, 0)
    assert family.expansion(Layout(3)) == written


@pytest.mark.parametrize("name", PROCESSORS)
def test_the_prompt_is_that_of_the_processor(name: str, tmp_path: Path) -> None:
    folder = settings_folder(tmp_path, name)
    kind, settings = PROCESSORS[name]
    words, family = tokenizer(name), FAMILIES[name]
    load: Any = AutoImageProcessor.from_pretrained
    image_processor = load(folder, backend="pil")
    if name == "paligemma":
        image_processor.image_seq_length = 256
    processor = kind(image_processor=image_processor, tokenizer=words, **settings)
    sizes = ((60, 200), (400, 90))
    shown = [picture(*size) for size in sizes]
    placeholder = family.placeholder
    text = f"{placeholder}a{placeholder} b"
    read = processor(
        images=[[Image.fromarray(pixels(*size)) for size in sizes]], text=[text], add_special_tokens=False,
    )  # fmt: skip
    preparer = Preparer(folder, "float32")
    images = [preparer.prepare(bytes(32), one, max_pixels=10**6) for one in shown]
    written = f"{images[0].expansion}a{images[1].expansion} b"
    ours = words(family.arrange(written, "<s>"), add_special_tokens=False)["input_ids"]
    assert list(read["input_ids"][0]) == ours
