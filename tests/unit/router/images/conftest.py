from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from image_scene import Scene
from router_fakes import INFO, Router
from support.image_fakes import Images
from support.vision_settings import SETTINGS, settings_folder
from tokenizers import AddedToken, Tokenizer

SEES = replace(INFO, images=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The settings of llava with a tower of 56 pixels: 16 tokens for each image."""
    config, processor = SETTINGS["llava"]
    vision = config["vision_config"] | {"image_size": 56}
    small = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
    SETTINGS["small"] = config | {"vision_config": vision}, processor | small
    try:
        return settings_folder(tmp_path_factory.mktemp("llava"), "small")
    finally:
        del SETTINGS["small"]


@pytest.fixture
def make_scene(tokenizer: Tokenizer, make_router: Callable[..., Router], folder: Path) -> Callable[..., Scene]:
    def make(*, templates: dict[str, str] | None = None, **options: Any) -> Scene:
        router = make_router(info=SEES, templates=templates)
        router.tokenizer.close()
        with_image = Tokenizer.from_str(tokenizer.to_str())
        with_image.add_special_tokens([AddedToken("<image>", special=True)])
        router.tokenizer.__init__(with_image, num_workers=1)  # type: ignore[misc]
        token_id = router.tokenizer.added_tokens["<image>"]
        images = Images(folder, token_id, **options)
        router.inference.validator.images = images.prompts
        return Scene(router, images, token_id)

    return make
