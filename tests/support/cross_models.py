"""Tiny random models whose layers of cross attention read images: Mllama and the first Idefics, with all files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.vision_models import randomise

_SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "vocab_size": 300, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "mllama": {
        "text_config": _SIZES | {
            "num_key_value_heads": 2, "cross_attention_layers": [1, 3], "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "attention_heads": 4,
            "num_global_layers": 1, "intermediate_layers_indices": [0, 1], "vision_output_dim": 96, "image_size": 56,
            "patch_size": 14, "max_num_tiles": 4,
        },
        "image_token_index": 300,
    },
    "idefics": _SIZES | {
        "additional_vocab_size": 2, "cross_layer_interval": 2, "qk_layer_norms": True, "use_resampler": True,
        "alpha_type": "vector", "max_position_embeddings": 2048, "tie_word_embeddings": False,
        "perceiver_config": {
            "use_resampler": True, "resampler_n_latents": 4, "resampler_depth": 2, "resampler_n_heads": 4,
            "resampler_head_dim": 16, "qk_layer_norms_perceiver": True,
        },
        "vision_config": {
            "embed_dim": 32, "image_size": 28, "patch_size": 14, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
    },
}  # fmt: skip
_PROCESSORS: dict[str, dict[str, Any]] = {
    "mllama": {
        "image_processor_type": "MllamaImageProcessor", "size": {"height": 56, "width": 56}, "max_image_tiles": 4,
    },
    "idefics": {"image_processor_type": "IdeficsImageProcessor", "image_size": 28},
}  # fmt: skip
_TOKENS = {"mllama": ["<|image|>"], "idefics": ["<fake_token_around_image>", "<image>"]}
# A template that shows images as those of Llama 3.2 Vision do.
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|user|>{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}{% endfor %}<|assistant|>"
)


def write_cross_checkpoint(folder: Path, name: str, **changes: Any) -> Any:
    """Model, tokenizer and image processor's settings; returns transformers' model. changes: of the config."""
    import torch
    from support.tiny_models import write_tokenizer
    from tokenizers import AddedToken, Tokenizer
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.for_model(name, **CONFIGS[name] | changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").float().eval()
    randomise(model, tied=False)
    model.generation_config.eos_token_id = 1
    model.generation_config.pad_token_id = 2
    model.save_pretrained(folder)
    write_tokenizer(folder, vocab_size=300)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(one, normalized=False, special=True) for one in _TOKENS[name]])
    tokenizer.save(str(folder / "tokenizer.json"))
    file = folder / "tokenizer_config.json"
    shown = "".join(_TOKENS[name]) + (_TOKENS[name][0] if name == "idefics" else "")
    template = _TEMPLATE.replace("IMAGE", shown)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template, "pad_token": "</s>"}))
    (folder / "preprocessor_config.json").write_text(json.dumps(_PROCESSORS[name]))
    return model
