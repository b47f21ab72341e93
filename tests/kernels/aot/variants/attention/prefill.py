"""What the kernels of `model_server.kernels.attention.prefill` are compiled for."""

from __future__ import annotations

from aot.attention_examples import Example, example_variants
from aot.variant import Variant
from model_server.kernels.attention.parts import STRIDES, Tiles, layer_arguments, widths_of
from model_server.kernels.attention.prefill import PrefillConfig, _constants, prefill_kernel, prefill_tiles


def variants() -> list[Variant]:
    """Compile real layers with pages of 16, those with a window also seeing ahead."""

    def constants(example: Example, memory: int) -> list[tuple[dict[str, int | bool | None], Tiles]]:
        layer = example.layer
        widths = widths_of(layer, example.value_in_key)
        return [
            (
                {
                    **_constants(layer, layer_arguments(layer), PrefillConfig(widths, tiles), 16, ahead=ahead),
                    **({} if ahead else {"last_keys": None, "first_keys": None}),
                },
                tiles,
            )
            for tiles in prefill_tiles(widths, example.cache_itemsize, memory)
            for ahead in ((False, True) if layer.window is not None else (False,))
        ]

    return example_variants(
        prefill_kernel,
        {
            **dict.fromkeys(("tables", "tiles", "last_keys", "first_keys"), "*i32"),
            **dict.fromkeys(("scale", "softcap", "alibi_scale", "value_scale"), "fp32"),
            **dict.fromkeys((*STRIDES, "table_stride", "reach"), "i32"),
        },
        STRIDES,
        constants,
    )
