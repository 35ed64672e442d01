"""The slices in which the output head and its loss compute logits; memory predictions read them without torch."""

from collections.abc import Iterator

# Measured on one thread of a CPU with 2 MiB of L2 cache per core, 2048 rows: chunks of 1-8 MiB of float32 are equal.
# The gradient of the weight is added once per block: at a vocabulary of 50257, blocks of 32 MiB take 1.6x as long as
# 200 MiB. Against logits, cross-entropy and their backward: 0.5x the time at 4096 in bfloat16, else 0.75-0.9x.
SOFTMAX_CHUNK_BYTES = {"cpu": 4 << 20}
DEFAULT_SOFTMAX_CHUNK_BYTES = 64 << 20
# Assumed for a GPU: each block reads and writes the float32 gradient of the weight, 2 GB at 128,000 entries.
LOGITS_BLOCK_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}

TARGET_COUNT_MULTIPLE = 64  # The masked head computes this many rows, or a multiple


def even_row_slices(rows: int, max_rows: int) -> Iterator[slice]:
    """Equally long slices of at most `max_rows` rows, but of 8 at least."""
    count = max(1, -(-rows // max(8, max_rows)))
    size = -(-rows // count) if rows else 1
    return (slice(start, start + size) for start in range(0, rows, size))


def padded_targets(count: int) -> int:
    """The rows that the masked head computes for a number of targets."""
    return -(-max(count, 1) // TARGET_COUNT_MULTIPLE) * TARGET_COUNT_MULTIPLE
