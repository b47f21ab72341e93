"""A model whose greedy answer is whatever a test says, as a checkpoint like any other.

It is a Llama of one layer whose attention copies the token DISTANCE positions back, so an answer that stands in the
prompt, so far from its end, comes out again. Each token has a second one in the vocabulary, written `<|t123|>`, which
is read as the same and never generated: prompts spell answers with those, and no mark of an answer is in a prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from support.tiny_models import EOS, write_tokenizer
from tokenizers import Tokenizer

DISTANCE = 768
"""From a token of the prompt to its copy; an answer and what follows it in the prompt have so many tokens."""
MAX_POSITIONS = 4096
_HEAD_SIZE = 128
_NUM_HEADS = 2
_SHARPNESS = 6.0  # of keys and queries
_COPIED = 8.0  # how much louder the copied token is than the last one of the prompt
_LOGITS = 0.05  # of the distance between two codes

Piece = str | int | Sequence[int]
"""Of an answer: a text, in which marks are tokens, or the ids of tokens."""


class ScriptedModel:
    """The files in `path`, and answers in the form in which prompts hold them."""

    def __init__(
        self,
        path: Path,
        tokens: Mapping[str, bool] | None = None,
        *,
        ends: Sequence[str] = (),
        max_positions: int = MAX_POSITIONS,
        **settings: Any,
    ) -> None:
        """Write the files.

        Args:
            path: The folder.
            tokens: Added to the vocabulary; whether they are special.
            ends: Tokens of these that end an answer, too.
            max_positions: Of prompt and answer.
            settings: Of tokenizer_config.json, its chat template among them.
        """
        self.path = path
        self._max_positions = max_positions
        self._write_tokenizer(tokens or {}, settings)
        self._write_weights([EOS, *ends])

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.path / "tokenizer.json"))

    @cached_property
    def _letters(self) -> Tokenizer:
        """Without added tokens: marks are ordinary text."""
        fields = json.loads((self.path / "tokenizer.json").read_text())
        return Tokenizer.from_str(json.dumps(fields | {"added_tokens": [], "post_processor": None}))

    def ids(self, *answer: Piece) -> list[int]:
        """Of an answer, without an end."""
        ids: list[int] = []
        for piece in answer:
            if isinstance(piece, str):
                ids += self.tokenizer.encode(piece, add_special_tokens=False).ids
            else:
                ids += [piece] if isinstance(piece, int) else piece
        return ids

    def letters(self, text: str) -> list[int]:
        """Of a text whose marks are no tokens, but ordinary letters."""
        ids: list[int] = self._letters.encode(text).ids
        return ids

    def single_bytes(self, text: str) -> list[int]:
        """Of a text of which each byte is a token."""
        alphabet = _byte_letters()
        ids = [self.tokenizer.token_to_id(alphabet[byte]) for byte in text.encode()]
        assert None not in ids
        return ids

    @property
    def end(self) -> int:
        return int(self.tokenizer.token_to_id(EOS))

    def written(self, ids: Sequence[int]) -> str:
        """Tokens as a prompt holds them."""
        return "".join(f"<|t{one}|>" for one in ids)

    def prompt(self, *answer: Piece, behind: str = "", ends: bool = True) -> str:
        """A text after which, and after the text `behind` it, the model answers so. `ends`: with its end token."""
        ids = self.ids(*answer) + ([self.end] if ends else [])
        left = DISTANCE - len(ids) - len(self.ids(behind))
        assert left >= 0, f"{-left} tokens too many in the answer and behind it"
        return self.written(ids) + self.written([self.end]) * left

    def _write_tokenizer(self, tokens: Mapping[str, bool], settings: Mapping[str, Any]) -> None:
        from tokenizers import AddedToken

        self.path.mkdir(parents=True, exist_ok=True)
        write_tokenizer(self.path)
        tokenizer = Tokenizer.from_file(str(self.path / "tokenizer.json"))
        tokenizer.add_special_tokens([AddedToken(text, special=True) for text, special in tokens.items() if special])
        tokenizer.add_tokens([AddedToken(text, special=False) for text, special in tokens.items() if not special])
        tokenizer.add_special_tokens([f"<|t{number}|>" for number in range(tokenizer.get_vocab_size())])
        tokenizer.save(str(self.path / "tokenizer.json"))
        config = self.path / "tokenizer_config.json"
        fields = json.loads(config.read_text()) | {"model_max_length": self._max_positions} | settings
        config.write_text(json.dumps(fields))

    def _write_weights(self, ends: Sequence[str]) -> None:
        import torch
        from safetensors.torch import save_file

        size = _HEAD_SIZE * _NUM_HEADS
        num_tokens = self.tokenizer.get_vocab_size() // 2
        generator = torch.Generator().manual_seed(0)
        codes = torch.randint(2, (num_tokens, size), generator=generator).float() * 2 - 1
        nothing = torch.zeros(size, size)
        # Keys are the same everywhere, queries are turned as far as the token to copy is away.
        angles = (DISTANCE - 1) / 10_000 ** (torch.arange(0, _HEAD_SIZE, 2).double() / _HEAD_SIZE)
        key = torch.cat([torch.ones(_HEAD_SIZE // 2), torch.zeros(_HEAD_SIZE // 2)]).repeat(_NUM_HEADS)
        query = torch.cat([angles.cos(), -angles.sin()]).float().repeat(_NUM_HEADS)
        layer, attention = "model.layers.0", "model.layers.0.self_attn"
        weights = {
            "model.embed_tokens.weight": codes.repeat(2, 1),
            "lm_head.weight": torch.cat([codes, torch.zeros_like(codes)]) * _LOGITS,
            "model.norm.weight": torch.ones(size),
            f"{layer}.input_layernorm.weight": torch.ones(size),
            f"{layer}.post_attention_layernorm.weight": torch.ones(size),
            f"{attention}.q_proj.weight": nothing,
            f"{attention}.q_proj.bias": query * _SHARPNESS,
            f"{attention}.k_proj.weight": nothing.clone(),
            f"{attention}.k_proj.bias": key * _SHARPNESS,
            f"{attention}.v_proj.weight": torch.eye(size),
            f"{attention}.v_proj.bias": torch.zeros(size),
            f"{attention}.o_proj.weight": torch.eye(size) * _COPIED,
            f"{attention}.o_proj.bias": torch.zeros(size),
            f"{layer}.mlp.gate_proj.weight": torch.zeros(16, size),
            f"{layer}.mlp.up_proj.weight": torch.zeros(16, size),
            f"{layer}.mlp.down_proj.weight": torch.zeros(size, 16),
        }
        save_file(weights, self.path / "model.safetensors", metadata={"format": "pt"})
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": size,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": _NUM_HEADS,
            "num_key_value_heads": _NUM_HEADS,
            "head_dim": _HEAD_SIZE,
            "attention_bias": True,
            "vocab_size": 2 * num_tokens,
            "max_position_embeddings": self._max_positions,
            "rope_theta": 10_000.0,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": self.end,
            "torch_dtype": "float32",
        }
        (self.path / "config.json").write_text(json.dumps(config))
        end_ids = [self.tokenizer.token_to_id(text) for text in ends]
        (self.path / "generation_config.json").write_text(json.dumps({"eos_token_id": end_ids}))


def _byte_letters() -> dict[int, str]:
    """How a byte-level vocabulary writes each byte: those that print as themselves, others from 256 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + number) for number, byte in enumerate(others)}
