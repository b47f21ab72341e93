"""The sizes of docs/choosing-a-model.md are those that the bits of the weights give."""

from __future__ import annotations

import re

from support import documents

from benchmarks.peers.quantized import BITS

TEXT = documents.read("docs/choosing-a-model.md")


def test_the_sizes_that_fit() -> None:
    table = documents.rows(documents.section(TEXT, "How large"))
    assert len(table) == 5
    for memory, *sizes in table:
        available = int(memory.split()[0]) * 2**30 * 0.8
        for said, bits in zip(sizes, (16, BITS["q8_0"], BITS["q4_k_m"]), strict=True):
            assert int(said.split()[0]) == int(available * 8 / bits / 1e9), (memory, said)


def test_the_speed_that_bandwidth_allows() -> None:
    found = re.search(
        r"with (\d+) GB/s a model of (\d+) billion parameters gives at most (\d+) tokens/s in 16 bits, and (\d+) in 4",
        TEXT,
    )
    assert found is not None
    bandwidth, billions, plain, small = map(int, found.groups())
    assert plain == round(bandwidth / (billions * 2)) and small == round(bandwidth / (billions * BITS["q4_k_m"] / 8))
