"""Trains the demo model and writes it into the package.

    python -m demo_model.train                   # the whole training, about an hour on two cores
    python -m demo_model.train --smoke           # a checkpoint of the final shape in about a minute
    python -m demo_model.train --resume          # goes on from the last checkpoint

Learning rate: warm-up, constant, then a linear decay over the last steps. A run can therefore be prolonged: resume
from a checkpoint that was written before the decay, with more steps.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import LlamaForCausalLM

from demo_model import model as shape
from demo_model import tokenizer
from demo_model.batches import Batch, Encoder, stream

CHECKPOINTS = Path(__file__).resolve().parent / "checkpoints"
MICRO_STEPS = 2
WARM_UP = 60
FLOOR = 0.02
SHORT = 160


def optimizers(model: LlamaForCausalLM, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, which learns this corpus in about half the steps, AdamW for embedding and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def factor(step: int, steps: int, decay: int) -> float:
    """The learning rate of a step as a part of the full one."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return max(FLOOR, min(1.0, (steps - step) / max(decay, 1)))


def loss_of(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """Weighted sum of the token losses; the caller divides by the weights of the whole step."""
    # The fused kernel for processors only pays for long rows: short ones run a third faster without it.
    model.set_attn_implementation("eager" if batch.ids.shape[1] <= SHORT else "sdpa")
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=batch.ids[:, :-1], use_cache=False).logits
    losses = cross_entropy(logits.flatten(0, 1).float(), batch.ids[:, 1:].flatten(), reduction="none")
    return (losses * batch.weights[:, 1:].flatten()).sum()


def save(path: Path, model: LlamaForCausalLM, used: list[torch.optim.Optimizer], step: int, tokens: int) -> None:
    """A checkpoint, written aside first so that a crash never leaves half a file."""
    path.parent.mkdir(exist_ok=True)
    state = {"model": model.state_dict(), "step": step, "tokens": tokens, "optimizers": [o.state_dict() for o in used]}
    torch.save(state, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)


def load(path: Path, model: LlamaForCausalLM, used: list[torch.optim.Optimizer]) -> tuple[int, int]:
    """Restores model and optimizers; returns step and tokens."""
    state: dict[str, Any] = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(used, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return int(state["step"]), int(state["tokens"])


def train(options: argparse.Namespace) -> float:
    """The training loop; returns the loss averaged over the last steps."""
    torch.set_num_threads(options.threads)
    encoder = Encoder()
    model = shape.fresh()
    used = optimizers(model, options.rate)
    step, tokens = load(options.checkpoint, model, used) if options.resume else (0, 0)
    model.train()
    started, smooth, tokens_before = time.monotonic(), 0.0, tokens
    bar = tqdm(total=options.steps, initial=step, unit="step", mininterval=10, maxinterval=30, ncols=110)
    for batches in stream(encoder, step, MICRO_STEPS):
        if step >= options.steps:
            break
        for optimizer, full in zip(used, (options.rate, options.rate), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = full * factor(step, options.steps, options.decay)
        weight = sum(float(batch.weights[:, 1:].sum()) for batch in batches)
        loss = 0.0
        for batch in batches:
            share = loss_of(model, batch) / weight
            torch.autograd.backward(share)
            loss += share.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in used:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        tokens += sum(batch.num_tokens for batch in batches)
        smooth = loss if smooth == 0.0 else 0.98 * smooth + 0.02 * loss
        speed = (tokens - tokens_before) / (time.monotonic() - started)
        bar.set_postfix_str(f"loss {smooth:.4f}, {speed:.0f} tok/s, {tokens / 1e6:.2f} M tokens", refresh=False)
        bar.update()
        if step % options.save_every == 0 or step == options.steps or step == options.steps - options.decay:
            save(options.checkpoint, model, used, step, tokens)
            if step == options.steps - options.decay:  # the point from which a longer run can go on
                save(options.checkpoint.with_stem("before_decay"), model, used, step, tokens)
    bar.close()
    print(f"step {step}, {tokens} tokens, loss {smooth:.4f}, {time.monotonic() - started:.0f} s")
    if options.output is not None:
        shape.write(model, options.output)
    return smooth


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options; `--smoke` is a short run into the same place."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2450)
    parser.add_argument("--decay", type=int, default=550, help="steps over which the learning rate falls at the end")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINTS / "last.pt")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="60 steps only")
    parser.add_argument("--output", type=Path, default=tokenizer.PACKAGE, help="folder of the finished model")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.steps, options.decay = 60, 20
        options.checkpoint = CHECKPOINTS / "smoke.pt"
    return options


if __name__ == "__main__":
    train(parse())
