"""What the sampling kernels share; the rules are those of `sampling.categorical` and `sampling.filters`."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from model_server.kernels.trial import INTERPRETED

NUM_BUCKETS = 16

BUCKETS = tl.constexpr(NUM_BUCKETS)
LAST_BUCKET = tl.constexpr(NUM_BUCKETS - 1)
_FIRST_EDGE = tl.constexpr(0x3E800000)  # the pattern of 0.25
_EDGE_SHIFT = tl.constexpr(22)  # half an octave
_TO_NEXT_EDGE = tl.constexpr((1 << 22) - 1)
NO_ID = tl.constexpr(0x7FFFFFFF)
_LIBDEVICE = tl.constexpr(not INTERPRETED)  # the interpreter has no libdevice


@triton.jit
def place_and_tile(num_tiles):
    # All programs are on the first axis: a GPU takes no more than 65,535 on the others.
    program = tl.program_id(0)
    return program // num_tiles, program % num_tiles


@triton.jit
def load_peak(peaks, place, num_tiles, TILES: tl.constexpr):
    """Return a row's largest logit, and whether it is unusable."""
    tile = tl.arange(0, TILES)
    each = tl.load(peaks + place.to(tl.int64) * num_tiles + tile, mask=tile < num_tiles, other=-float("inf"))
    has_nan = tl.max((each != each).to(tl.int32), 0) > 0
    peak = tl.max(tl.where(each != each, -float("inf"), each), 0)
    return peak, has_nan | (peak == float("inf")) | (peak == -float("inf"))


@triton.jit
def weight_of(value, SCALE: tl.constexpr):
    """`drawing.weights`."""
    if _LIBDEVICE:  # noqa: SIM108 - only one of the two may be compiled
        exponential = libdevice.exp(value)
    else:
        exponential = tl.exp(value)
    return (exponential * SCALE).to(tl.int64)


@triton.jit
def distance_of(value):
    """Return the pattern of -value, which ascends as a value up to 0 falls."""
    return tl.abs(value).to(tl.int32, bitcast=True)


@triton.jit
def bucket_of(distance):
    beyond = (distance - _FIRST_EDGE + _TO_NEXT_EDGE) >> _EDGE_SHIFT
    return tl.where(distance <= _FIRST_EDGE, 0, tl.minimum(beyond, LAST_BUCKET))


@triton.jit
def _mix(z):
    """`randomness._mix`, on uint64."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def next_uniform(seeds, counts, place):
    """Draw `randomness.uniforms`, and count the row's token."""
    count = tl.load(counts + place)
    tl.debug_barrier()  # all threads have loaded before one of them stores: they must draw with the same number
    tl.store(counts + place, count + 1)
    seed = tl.load(seeds + place).to(tl.uint64, bitcast=True)
    number = count.to(tl.uint64, bitcast=True)
    one = tl.full([], 1, tl.uint64)
    golden = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    bits = _mix(_mix(seed) + golden * (number + one)) >> 11
    return bits.to(tl.int64, bitcast=True).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def target_of(uniform, total):
    """`drawing._target`."""
    return tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def num_wanted(total, dropped):
    """Return the weight below which top-p keeps the next token."""
    return total - tl.floor(dropped * total.to(tl.float64)).to(tl.int64)


@triton.jit
def write_choice(ids, packed, row, num_rows, token, logprob, failed):
    token = tl.where(failed, 0, token).to(tl.int64)
    tl.store(ids + row, token)
    tl.store(packed + row, token.to(tl.float64))
    tl.store(packed + num_rows + row, tl.where(failed, 0.0, logprob).to(tl.float64))
    tl.store(packed + 2 * num_rows + row, failed.to(tl.float64))


@triton.jit
def write_drawn(
    logits_row, ids, packed, row, num_rows, token, peak, temperature, total, failed, vocab, SCALE: tl.constexpr
):
    token = tl.minimum(token, vocab - 1)  # of failed rows: anything that can be read
    value = tl.div_rn(tl.load(logits_row + token) - peak, temperature)
    share = tl.maximum(total, 1).to(tl.float64) * (1.0 / SCALE)
    write_choice(ids, packed, row, num_rows, token, value - tl.log(share).to(tl.float32), failed)
