"""What a compiled kernel may use."""

from __future__ import annotations

# Dynamic shared memory of one block, KiB, by capability (CUDA C++ Programming Guide, "Technical Specifications per
# Compute Capability": maximum per block).
SHARED_KIB = {80: 163, 89: 99, 90: 227, 100: 227}

# The cards of capability 8.6 and 8.9 run what is compiled for 8.0, with less memory: not a failure here, because the
# launch code may choose a smaller form for them, but said.
SMALL_SHARED_KIB = 99

# Columns of tensor memory that a block can have at all (capability 10.0).
TENSOR_MEMORY_COLUMNS = 512

# Bytes a thread may write to local memory because registers ran out. A few are loop-invariant addresses, which cost
# next to nothing; hundreds mean that a tile does not fit and moves through the cache in every turn of the loop.
SPILL_STORE_BYTES = 192
