"""How gradients and parameters travel between workers and servers: as they are, or compressed.

What compression loses of one message is added to what the next one holds: of a gradient by the worker, which pushes the
same piece again with its next share, and of parameters by their server, for the next version.
"""

import torch
from torch import Tensor

from motet.collectives.compression.byte_messages import codec_numerics, decode, encode
from motet.collectives.compression.codec_base import Codec
from motet.collectives.compression.error_feedback import ErrorFeedback, message_seed
from motet.parallel.parameter_server.server_settings import PushPullCompression

# Of a piece, what a second server has to know beside masters and moments.
ERROR_FEEDBACK_ENTRY, PUBLISHED_VALUE_ENTRY = "pull/error", "pull/message"


class PushPullCompressor:
    """Of what one process sends: gradients of a worker, or parameters of a server."""

    def __init__(self, codec: Codec, compression: PushPullCompression) -> None:
        self._codec = codec
        self._seed = compression.seed
        self._error_feedback = ErrorFeedback(codec, compression.seed) if compression.has_error_feedback else None

    def compress(self, slice_id: int, sequence_number: int, tensor: Tensor) -> Tensor:
        """The message about a piece; `number` is what whoever unpacks it knows, too."""
        with codec_numerics():
            if self._error_feedback is not None:
                return self._error_feedback.encode(str(slice_id), tensor, sequence_number)
            return encode(self._codec, tensor, message_seed(self._seed, str(slice_id), sequence_number))

    def error_feedback_state(self, slice_id: int) -> dict[str, Tensor]:
        """Empty without feedback."""
        errors = self._error_feedback.errors if self._error_feedback is not None else {}
        return {ERROR_FEEDBACK_ENTRY: errors[str(slice_id)]} if str(slice_id) in errors else {}

    def load_error_feedback(self, slice_id: int, error: Tensor) -> None:
        if self._error_feedback is not None:
            self._error_feedback.errors[str(slice_id)] = error.clone()


def decompress_gradient(
    compression: PushPullCompression, message: bytearray | memoryview, slice_id: int, work_item: int, like: Tensor
) -> Tensor:
    """`like` has its shape and dtype."""
    if compression.push_codec is None:
        return torch.frombuffer(message, dtype=like.dtype)
    content = torch.frombuffer(message, dtype=torch.uint8)
    with codec_numerics():
        return decode(
            compression.push_codec,
            content,
            like.shape,
            like.dtype,
            message_seed(compression.seed, str(slice_id), work_item),
        )


def decompress_parameters(compression: PushPullCompression, message: bytearray | memoryview, like: Tensor) -> Tensor:
    """`like` has their shape and dtype."""
    if compression.pull_codec is None:
        return torch.frombuffer(message, dtype=like.dtype)
    with codec_numerics():
        return decode(compression.pull_codec, torch.frombuffer(message, dtype=torch.uint8), like.shape, like.dtype)
