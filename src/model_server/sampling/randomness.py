"""The random numbers of draws: a pure function of (seed, number of tokens generated so far).

No generator objects and no state: a request draws the same numbers alone or in any batch, on every rank, and after
it was preempted and computed again.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Constants of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014).
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(seeds: NDArray[np.uint64], num_generated: NDArray[np.uint64]) -> NDArray[np.float64]:
    """One number in [0, 1) per row, for `seeds` [n] and `num_generated` [n].

    The value is output number `num_generated` of the SplitMix64 stream whose state starts at the mixed seed (mixed, so
    that neighbouring seeds do not share a stream). The top 53 bits become the fraction.
    """
    state = _mix(seeds) + _GOLDEN * (num_generated + np.uint64(1))
    return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))
