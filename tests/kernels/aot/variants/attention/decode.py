"""What the kernels of `model_server.kernels.attention.decode` are compiled for."""

from __future__ import annotations

from aot.attention_examples import Example, example_variants
from aot.variant import Variant
from model_server.kernels.attention.decode import _constants, decode_kernel
from model_server.kernels.attention.decode_config import NO_SPLITS, config_of
from model_server.kernels.attention.parts import STRIDES, Tiles, layer_arguments, widths_of

# Layers that windows are compiled for ahead of time.
_WINDOW_EXAMPLES = ("64", "128", "256, softcap")
# Those whose tables may list slots, as keys are chosen.
_SPARSE_EXAMPLES = ("latent, 128 heads",)


def variants() -> list[Variant]:
    """Layers of real models, pages of 16, or of 1."""

    def constants(example: Example, memory: int) -> list[tuple[dict[str, int | bool], Tiles]]:
        layer = example.layer
        widths = widths_of(layer, example.value_in_key)
        found = []
        for places in (1, 6) if example.name in _WINDOW_EXAMPLES else (1,):
            config = config_of(widths, layer, example.cache_itemsize, memory, NO_SPLITS, places)
            for page in (16, 1) if example.name in _SPARSE_EXAMPLES else (16,):
                found.append((_constants(layer, layer_arguments(layer), config, page), config.tiles))
        return found

    return example_variants(
        decode_kernel,
        {
            **dict.fromkeys(("tables", "items", "arrivals", "lengths"), "*i32"),
            **dict.fromkeys(("partials", "stats"), "*fp32"),
            **dict.fromkeys(("scale", "softcap", "alibi_scale", "value_scale"), "fp32"),
            **dict.fromkeys((*STRIDES, "table_stride"), "i32"),
        },
        STRIDES,
        constants,
    )
