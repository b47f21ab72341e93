"""The tokens of a prompt with files of images, as a model server of upstream TGI makes them. Written from its protocol
alone, so that it can tell what the router counts wrong."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from PIL import Image
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoImageProcessor
from transformers.image_processing_utils import select_best_resolution

from wire.images.llama4 import Llama4Processor
from wire.v3 import generate_pb2 as pb

FAKE = "<fake_token_around_image>"


class UpstreamPrompts:
    """For the model in a folder. `files`: of the last request."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self._config: Any = AutoConfig.from_pretrained(folder)
        self._type: str = self._config.model_type
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self.files: list[pb.Image] = []
        if self._type == "llama4":
            self._processor: Any = Llama4Processor.from_folder(folder)
        else:
            changed = {"size": {"longest_edge": 1456}} if self._type == "idefics3" else {}
            self._processor = AutoImageProcessor.from_pretrained(folder, backend="pil", **changed)

    def cut(self, request: pb.Request) -> list[int]:
        parts, self.files = [], []
        for chunk in request.input_chunks.chunks:
            if chunk.WhichOneof("chunk") == "text":
                assert chunk.text
                parts.append(f"<bos>{chunk.text}\n" if self._type == "paligemma" else chunk.text)
            else:
                self.files.append(chunk.image)
                parts.append(self._written(Image.open(io.BytesIO(chunk.image.data))))
        text = "".join(parts)
        if self._type == "idefics2":
            text = text.replace(FAKE + FAKE, FAKE)
        adds = request.add_special_tokens and self._type != "paligemma"
        self._tokenizer.enable_truncation(request.truncate, direction="left")
        return list(self._tokenizer.encode(text, add_special_tokens=adds).ids)

    def _written(self, image: Image.Image) -> str:
        """The text of one image."""
        kind, config = self._type, self._config
        if kind == "mllama":
            return "<|image|>"
        if kind == "idefics":
            return f"{FAKE}<image>{FAKE}"
        if kind == "idefics2":
            return f"{FAKE}{'<image>' * 64}{FAKE}" * (5 if self._processor.do_image_splitting else 1)
        if kind == "paligemma":
            return "<image>" * config.text_config.num_image_tokens
        if kind == "gemma3":
            return f"\n\n<start_of_image>{'<image_soft_token>' * 256}<end_of_image>\n\n"
        if kind == "llava_next":
            return "<image>" * llava_next_features(image.height, image.width, config)
        if kind.startswith("qwen"):
            if image.width <= 20:
                image = image.resize((image.width * 2, image.height * 2))
            frames, rows, columns = self._processor([image], return_tensors="np")["image_grid_thw"][0]
            return f"<|vision_start|>{'<|image_pad|>' * (frames * rows * columns // 4)}<|vision_end|>"
        if kind == "idefics3":
            made = self._processor([[image]], return_tensors="np", return_row_col_info=True)
            side = config.vision_config.image_size // config.vision_config.patch_size
            tile = "<image>" * (side**2 // config.scale_factor**2)
            lines = [
                "".join(f"{FAKE}<row_{r + 1}_col_{c + 1}>{tile}" for c in range(made["cols"][0][0])) + "\n"
                for r in range(made["rows"][0][0])
            ]
            return "".join(lines) + ("\n" if lines else "") + f"{FAKE}<global-img>{tile}{FAKE}"
        assert kind == "llama4"
        import numpy as np

        made = self._processor(
            [np.asarray(image.convert("RGB"))], return_tensors="np", input_data_format="channels_last"
        )
        height, width = made["pixel_values"].shape[-2:]
        patch = config.vision_config.patch_size
        tile = "<|patch|>" * ((height // patch) * (width // patch) // 4)
        rows, columns = made["aspect_ratios"][0]
        line = "<|tile_x_separator|>".join([tile] * columns) + "<|tile_y_separator|>"
        return f"<|image_start|>{line * rows if rows * columns > 1 else ''}<|image|>{tile}<|image_end|>"


def llava_next_features(height: int, width: int, config: Any) -> int:
    """With the two sides of the grid exchanged, as upstream has them."""
    side, patch = config.vision_config.image_size, config.vision_config.patch_size
    patches = side // patch
    best_height, best_width = select_best_resolution((height, width), config.image_grid_pinpoints)
    grid_width, grid_height = best_height // side, best_width // side
    lines, columns = patches * grid_height, patches * grid_width
    if width / height > columns / lines:
        padding = (lines - (height * columns) // width) // 2
        lines -= 2 * padding
    else:
        padding = (columns - (width * lines) // height) // 2
        columns -= 2 * padding
    return int(lines * columns + lines + patches**2)
