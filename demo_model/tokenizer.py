"""The tokenizer of the demo model: byte-level BPE, single digits, learned from the corpus.

    python -m demo_model.tokenizer       # writes tokenizer.json and tokenizer_config.json of the package again

The same corpus gives the same files, byte for byte.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from demo_model import corpus
from demo_model.phrases import Document

FOLDER = Path(__file__).resolve().parent
PACKAGE = FOLDER.parent / "src" / "wire" / "demo_model"
TEMPLATE = FOLDER / "chat_template.jinja"
VOCABULARY = 2048
MAX_LENGTH = 4096
BOS, END, PAD = "<|bos|>", "<|end|>", "<|pad|>"
SYSTEM, USER, ASSISTANT, TOOL = "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"
SPECIAL = [PAD, BOS, END, SYSTEM, USER, ASSISTANT, TOOL]


def _strings(value: Any) -> Iterator[str]:
    """Every text of a document: the tokenizer learns from words, not from the file's own JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            if key == "function":  # schemas and calls stand in the prompt as JSON
                yield json.dumps(item)
            else:
                yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def train(documents: Iterable[Document]) -> Tokenizer:
    """A tokenizer learned from the documents; the same documents give the same file."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        # One token per digit: sums are learned digit by digit and work for numbers never seen together.
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for d in documents for text in _strings(d.as_json())), trainer)
    # Chat templates write the first token themselves; plain text gets it here.
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
            ),
        ]
    )
    return tokenizer


def config() -> dict[str, Any]:
    """The contents of tokenizer_config.json, chat template included."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LENGTH,
        "padding_side": "left",
        "chat_template": TEMPLATE.read_text(encoding="utf-8").removesuffix("\n"),
    }


def build() -> Tokenizer:
    """The tokenizer of the committed corpus part."""
    return train(corpus.generate(0))


def write(tokenizer: Tokenizer, folder: Path) -> None:
    """Both tokenizer files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n", encoding="utf-8")
    text = json.dumps(config(), indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    built = build()
    write(built, PACKAGE)
    print(f"{built.get_vocab_size()} tokens")
