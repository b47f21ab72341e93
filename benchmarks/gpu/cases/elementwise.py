"""S1, element-wise: norms, activations, and rotation with the write into the cache, against float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.cases.tally import Tally, limit_of, poison_memory
from benchmarks.gpu.context import Context
from model_server.layers.fused.choice import fused_for
from model_server.layers.fused.fused import HeadLayout
from model_server.layers.rotary import Rope, Rotary, inverse_frequencies

ROWS = (1, 2, 7, 64, 257, 2048)
WIDTHS = (2048, 4096, 5120, 8192, 96)
ROPES = {
    "default": Rope("default", 500000.0, 128, 131072),
    "linear": Rope("linear", 10000.0, 64, 4096, {"factor": 4.0}),
    "llama3": Rope(
        "llama3", 500000.0, 128, 131072,
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    ),
    "yarn": Rope("yarn", 1e6, 80, 131072, {"factor": 4.0, "original_max_position_embeddings": 32768}),
}  # fmt: skip
# heads, kv heads, head size, rotated
LAYOUTS = {"default": (32, 8, 128, 128), "linear": (8, 8, 96, 64), "llama3": (32, 4, 128, 128), "yarn": (8, 2, 80, 80)}


def run(context: Context) -> None:
    """What `layers.fused` chooses for this device."""
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        _norms(context, dtype)
        _activations(context, dtype)
        for name in ROPES:
            _rotation(context, name, dtype)


def _norms(context: Context, dtype: torch.dtype) -> None:
    fused = fused_for(context.device, dtype)
    tally = Tally(context, f"RMS norms {dtype} ({type(fused).__name__})")
    for width in WIDTHS[-1:] if context.tiny else WIDTHS:
        weight = torch.rand(width, device=context.device) + 0.5
        norm = fused.rms_norm(weight.to(dtype), 1e-5)
        exact = weight.to(dtype).double()
        for rows in ROWS[:3] if context.tiny else ROWS:
            if not context.has_time(2):
                tally.left_out(f"{rows}x{width}")
                continue
            x, added = (torch.randn(rows, width, device=context.device).to(dtype) for _ in range(2))
            poison_memory(context.device)
            tally.compare(f"{rows}x{width}", norm(x), _rms(x.double(), exact), limit_of(dtype))
            total = x.double() + added.double()
            summed, normed = norm.add(x, added.clone())
            tally.compare(f"{rows}x{width} sum", summed, total, limit_of(dtype))
            tally.compare(f"{rows}x{width} norm of it", normed, _rms(total, exact), 2 * limit_of(dtype))
    tally.tell()


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def _activations(context: Context, dtype: torch.dtype) -> None:
    fused = fused_for(context.device, dtype)
    tally = Tally(context, f"gated activations {dtype} ({type(fused).__name__})")
    exact = {"silu": F.silu, "gelu_pytorch_tanh": lambda t: F.gelu(t, approximate="tanh")}
    for name, function in exact.items():
        activation = fused.gated(name)
        for rows in ROWS[:3] if context.tiny else ROWS:
            size = 48 if context.tiny else 14336
            x = torch.randn(rows, 2 * size, device=context.device).to(dtype)
            poison_memory(context.device)
            gate, up = x.double().chunk(2, dim=-1)
            tally.compare(f"{name} {rows}x{size}", activation(x), function(gate) * up, limit_of(dtype))
    tally.tell()


def _rotation(context: Context, name: str, dtype: torch.dtype) -> None:
    """Queries and keys in place, keys and values into slots; nothing else in the cache changes."""
    fused = fused_for(context.device, dtype)
    tally = Tally(context, f"rotation and cache write, {name}, {dtype} ({type(fused).__name__})")
    heads, kv_heads, dim, rotated = LAYOUTS[name]
    layout = HeadLayout(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, rotary_dim=rotated)
    highest = 5000 if context.tiny else 200_000
    rotary = Rotary(ROPES[name], context.device)
    frequencies, scale = inverse_frequencies(ROPES[name])
    for tokens in (1, 3, 7) if context.tiny else (1, 3, 64, 513):
        if not context.has_time(3):
            tally.left_out(f"{tokens} tokens")
            continue
        positions = torch.randint(0, highest, (tokens,))
        positions[-1] = highest - 1
        qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device=context.device).to(dtype)
        before = qkv.double()
        rows = torch.full((4 * tokens + 16, 2 * kv_heads * dim), -7.0, device=context.device).to(dtype)
        slots = torch.randperm(len(rows) - 1)[:tokens].add(1).to(context.device)
        rotations = rotary.rotations(positions.to(context.device), highest)
        fused.rotate_write(qkv, layout, None, rotations, rows, slots)
        wanted = _rotate(before, positions, frequencies, scale, heads + kv_heads, dim, rotated)
        # Angles are float32 products of positions and frequencies, as in transformers.
        tally.compare(f"{tokens} tokens: queries and keys", qkv, wanted, max(limit_of(dtype), 2e-5))
        stored = rows.index_select(0, slots)
        tally.true(f"{tokens} tokens: stored", torch.equal(stored, qkv[:, heads * dim :]))
        rest = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        rest[slots] = False
        tally.true(f"{tokens} tokens: nothing else", bool((rows[rest] == -7.0).all()))
    tally.tell()


def _rotate(
    qkv: Tensor, positions: Tensor, frequencies: Tensor, scale: float, num: int, dim: int, rotated: int
) -> Tensor:
    """Pairs side by side; `num` heads rotate, those behind them do not."""
    angles = (positions.float()[:, None] * frequencies.cpu().float()[None]).double().to(qkv.device)
    cos, sin = (f(angles)[:, None] * scale for f in (torch.cos, torch.sin))
    result = qkv.clone()
    heads = result[:, : num * dim].view(len(qkv), num, dim)[..., :rotated]
    first, second = heads[..., 0::2].clone(), heads[..., 1::2].clone()
    heads[..., 0::2] = first * cos - second * sin
    heads[..., 1::2] = first * sin + second * cos
    return result
