"""Tiny random checkpoints of encoders and of decoders that embed, with sentence-transformers' files beside them.

In the form of the hub's. Writing one imports transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WORDS = [
    "the", "a", "of", "and", "to", "in", "is", "it", "on", "for", "with",
    "as", "was", "by", "rain", "water", "falls", "from", "clouds", "what", "who", "how",
    "deep", "learning", "machine", "cats", "eat", "fish", "like", "do", "not", "good", "bad",
    "query", "passage", "search", "document", "yes", "no", "in", "detail", "about", "weather", "tomorrow",
]  # fmt: skip
VOCAB_SIZE = 128
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 80,
}
_FILES = {"Identity": "linear"}
"""Of torch's activations; the others are in `activation`."""
_DECODER = {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True}
# Name of a case -> model type, and fields that differ from SIZES.
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "albert": ("albert", {"embedding_size": 32}),
    "bert": ("bert", {}),
    "camembert": ("camembert", {"pad_token_id": 1}),
    "deberta-v2": (
        "deberta-v2",
        {"pooler_hidden_size": 64, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0},
    ),
    "distilbert": ("distilbert", {"dim": 64, "n_heads": 4, "n_layers": 3, "hidden_dim": 96}),
    "electra": ("electra", {"embedding_size": 64}),
    "electra_narrow": ("electra", {"embedding_size": 32}),
    "eurobert": ("eurobert", {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}),
    "gte": ("gte", {"type_vocab_size": 2}),
    "modernbert": (
        "modernbert",
        {"local_attention": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1,
         "sep_token_id": 2, "num_hidden_layers": 4},
    ),
    "mpnet": ("mpnet", {"pad_token_id": 1}),
    "nomic_bert": ("nomic_bert", {}),
    "roberta": ("roberta", {"pad_token_id": 1}),
    "xlm-roberta": ("xlm-roberta", {"pad_token_id": 1}),
    "gemma3_text": (
        "gemma3_text",
        {**_DECODER, "use_bidirectional_attention": True, "sliding_window": 8, "num_hidden_layers": 4,
         "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "llama": ("llama", _DECODER),
    "mistral": ("mistral", {**_DECODER, "sliding_window": None}),
    "qwen2": ("qwen2", _DECODER),
    "qwen2_both_ways": ("qwen2", {**_DECODER, "is_causal": False}),
    "qwen3": ("qwen3", _DECODER),
}  # fmt: skip


def config_of(case: str, **fields: Any) -> Any:
    """transformers' config of a case."""
    from transformers import AutoConfig

    model_type, own = ENCODERS[case]
    return AutoConfig.for_model(model_type, **{**SIZES, **own, **fields})


def write_model(folder: Path, case: str, *, kind: str = "AutoModel", seed: int = 0, **fields: Any) -> Any:
    """A model with random weights and its tokenizer in `folder`; returns it. kind: transformers' auto class."""
    import torch
    import transformers

    torch.manual_seed(seed)
    model = getattr(transformers, kind).from_config(config_of(case, **fields)).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            if "embeddings.weight" in name and "word" in name:
                parameter.mul_(3)
    model.save_pretrained(folder)
    write_tokenizer(folder, pads_at_1=ENCODERS[case][1].get("pad_token_id") == 1)
    return model


def write_tokenizer(folder: Path, *, pads_at_1: bool = False, max_length: int = 64) -> None:
    """Words and pieces of them, [CLS] before and [SEP] behind, token types of pairs."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    special = ["[UNK]", "[PAD]", "[CLS]", "[SEP]"] if pads_at_1 else ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    entries = [*special, *dict.fromkeys(WORDS), *[letter for letter in letters if letter not in WORDS]]
    entries += [f"##{letter}" for letter in letters]
    vocabulary = {word: place for place, word in enumerate(entries[:VOCAB_SIZE])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )  # fmt: skip
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_length, "pad_token": "[PAD]",
        "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]",
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))


def write_sentence_files(
    folder: Path,
    *,
    pooling: Mapping[str, Any] | None = None,
    width: int = 64,
    dense: Sequence[tuple[int, str]] = (),
    normalize: bool = True,
    max_length: int | None = 48,
    prompts: Mapping[str, str] | None = None,
    default_prompt: str | None = None,
) -> None:
    """sentence-transformers' files. dense: width and activation of each module Dense."""
    import torch
    from safetensors.torch import save_file

    modules: list[tuple[str, str]] = [("", "sentence_transformers.models.Transformer")]
    modules.append(("1_Pooling", "sentence_transformers.models.Pooling"))
    configs: dict[str, dict[str, Any]] = {
        "1_Pooling": dict(pooling or {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True})
    }
    for number, (size, activation) in enumerate(dense, 2):
        name = f"{number}_Dense"
        modules.append((name, "sentence_transformers.models.Dense"))
        configs[name] = {
            "in_features": width, "out_features": size, "bias": True,
            "activation_function": f"torch.nn.modules.{_FILES.get(activation, 'activation')}.{activation}",
        }  # fmt: skip
        (folder / name).mkdir()
        tensors = {"linear.weight": torch.randn(size, width) * 0.2, "linear.bias": torch.randn(size) * 0.1}
        save_file(tensors, folder / name / "model.safetensors")
        width = size
    if normalize:
        modules.append((f"{len(modules)}_Normalize", "sentence_transformers.models.Normalize"))
    (folder / "modules.json").write_text(
        json.dumps([{"idx": i, "name": str(i), "path": p, "type": t} for i, (p, t) in enumerate(modules)])
    )
    for name, fields in configs.items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(fields))
    settings = {} if max_length is None else {"max_seq_length": max_length}
    (folder / "sentence_bert_config.json").write_text(json.dumps({**settings, "do_lower_case": False}))
    saved = {"prompts": dict(prompts or {}), "default_prompt_name": default_prompt, "similarity_fn_name": "cosine"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(saved))
