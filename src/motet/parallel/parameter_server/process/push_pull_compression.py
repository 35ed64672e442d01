"""Encoding and decoding of compressed pushes and pulls, with error feedback.
The sender adds the compression error of a message to its next message about the same slice: a worker to the gradient of
its next work item, a server to the parameters of the next version."""

from dataclasses import dataclass

import torch
from torch import Tensor

from motet.collectives.compression.byte_messages import codec_numerics, decode, encode
from motet.collectives.compression.codec_base import Codec
from motet.collectives.compression.error_feedback import ErrorFeedback, message_seed


@dataclass(frozen=True)
class PushPullCompression:
    """The codecs of pushes and pulls; None sends the tensor uncompressed."""

    push_codec: Codec | None = None
    pull_codec: Codec | None = None
    has_error_feedback: bool = True
    seed: int = 0


class PushPullCompressor:
    """Compresses what one process sends: gradients of a worker, or parameters of a server."""

    def __init__(self, codec: Codec, compression: PushPullCompression) -> None:
        self._codec, self._seed = codec, compression.seed
        self._error_feedback = ErrorFeedback(codec, compression.seed) if compression.has_error_feedback else None
        self.errors = self._error_feedback.errors if self._error_feedback else {}  # By slice

    def compress(self, slice_id: int, sequence_number: int, tensor: Tensor) -> Tensor:
        """The message about a slice. The receiver knows the sequence number, which seeds random codecs."""
        with codec_numerics():
            if self._error_feedback is not None:
                return self._error_feedback.encode(str(slice_id), tensor, sequence_number)
            return encode(self._codec, tensor, message_seed(self._seed, str(slice_id), sequence_number))


def decompress(codec: Codec | None, message: bytearray | memoryview, like: Tensor, *, seed: int = 0) -> Tensor:
    """The tensor of a message, in the shape and dtype of `like`."""
    if codec is None:
        return torch.frombuffer(message, dtype=like.dtype)
    with codec_numerics():
        return decode(codec, torch.frombuffer(message, dtype=torch.uint8), like.shape, like.dtype, seed)
