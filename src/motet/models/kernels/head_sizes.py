"""The heads that torch's kernel of variable length computes. Nothing here imports torch."""

MAX_HEAD_DIM, HEAD_DIM_MULTIPLE = 256, 8


def takes_heads(key_dim: int, value_dim: int) -> bool:
    """Whether the kernel computes heads of these sizes; values that are smaller than keys are padded."""
    return value_dim <= key_dim <= MAX_HEAD_DIM and key_dim % HEAD_DIM_MULTIPLE == 0
