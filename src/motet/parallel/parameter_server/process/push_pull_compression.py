"""Encoding and decoding of compressed pushes and pulls, with error feedback (arXiv:1901.09847).
The sender adds the compression error of a message to its next message about the same slice: a worker to the gradient of
its next work item, a server to the parameters of the next version."""

from dataclasses import dataclass

import torch
from torch import Tensor

from motet.collectives.compression.byte_messages import codec_numerics, decode, encode, to_accumulation_dtype
from motet.collectives.compression.codec_base import Codec
from motet.core.seeds import derive_seed


@dataclass(frozen=True)
class PushPullCompression:
    """The codecs of pushes and pulls; None sends the tensor uncompressed."""

    push_codec: Codec | None = None
    pull_codec: Codec | None = None
    has_error_feedback: bool = True
    seed: int = 0


def message_seed(seed: int, slice_id: int, sequence_number: int) -> int:
    """The seed with which a message about a slice is encoded and decoded."""
    return derive_seed(seed, sequence_number, str(slice_id))


class PushPullCompressor:
    """Compresses what one process sends: gradients of a worker, or parameters of a server."""

    def __init__(self, codec: Codec, compression: PushPullCompression) -> None:
        self._codec, self._compression = codec, compression
        self.errors: dict[int, Tensor] = {}  # By slice

    def compress(self, slice_id: int, sequence_number: int, tensor: Tensor) -> Tensor:
        """The message about a slice. The receiver knows the sequence number, which seeds random codecs.

        A message that is not finite leaves the error as it was, since no server applies such an update.
        """
        seed = message_seed(self._compression.seed, slice_id, sequence_number)
        with codec_numerics():
            if not self._compression.has_error_feedback:
                return encode(self._codec, tensor, seed)
            exact = to_accumulation_dtype(tensor)
            previous = self.errors.get(slice_id, torch.zeros_like(exact))
            corrected = exact + previous
            rounded = corrected.to(tensor.dtype)
            message = encode(self._codec, rounded, seed)
            sent = decode(self._codec, message, rounded.shape, rounded.dtype, seed)
            self.errors[slice_id] = torch.where(sent.isfinite().all(), corrected - sent, previous)
            return message


def decompress(codec: Codec | None, message: bytearray | memoryview, like: Tensor, *, seed: int = 0) -> Tensor:
    """The tensor of a message, in the shape and dtype of `like`."""
    if codec is None:
        return torch.frombuffer(message, dtype=like.dtype)
    with codec_numerics():
        return decode(codec, torch.frombuffer(message, dtype=torch.uint8), like.shape, like.dtype, seed)
