"""How gradients and parameters travel between workers and servers: as they are, or compressed.

What compression loses of one message is added to what the next one holds: of a gradient by the worker, which pushes the
same piece again with its next share, and of parameters by their server, for the next version.
"""

import torch
from torch import Tensor

from motet.collectives.compression.byte_messages import codec_numerics
from motet.collectives.compression.codec_options import CodecOptions
from motet.collectives.compression.encode_decode import decode, encode
from motet.collectives.compression.error_feedback import ErrorFeedback, message_seed
from motet.parallel.server.settings import Packing

ERROR, MESSAGE = "pull/error", "pull/message"
"""Of a piece, what a second server has to know beside masters and moments."""


class Packer:
    """Of what one process sends: gradients of a worker, or parameters of a server."""

    def __init__(self, codec: CodecOptions, packing: Packing) -> None:
        self._codec = codec
        self._seed = packing.seed
        self._feedback = ErrorFeedback(codec, packing.seed) if packing.feedback else None

    def pack(self, piece: int, number: int, tensor: Tensor) -> Tensor:
        """The message about a piece; `number` is what whoever unpacks it knows, too."""
        with codec_numerics():
            if self._feedback is not None:
                return self._feedback.encode(str(piece), tensor, number)
            return encode(self._codec, tensor, message_seed(self._seed, str(piece), number))

    def error(self, piece: int) -> dict[str, Tensor]:
        """Empty without feedback."""
        errors = self._feedback.errors if self._feedback is not None else {}
        return {ERROR: errors[str(piece)]} if str(piece) in errors else {}

    def load(self, piece: int, error: Tensor) -> None:
        if self._feedback is not None:
            self._feedback.errors[str(piece)] = error.clone()


def unpack_gradient(packing: Packing, message: bytearray | memoryview, piece: int, share: int, like: Tensor) -> Tensor:
    """`like` has its shape and dtype."""
    if packing.push is None:
        return torch.frombuffer(message, dtype=like.dtype)
    content = torch.frombuffer(message, dtype=torch.uint8)
    with codec_numerics():
        return decode(packing.push, content, like.shape, like.dtype, message_seed(packing.seed, str(piece), share))


def unpack_parameters(packing: Packing, message: bytearray | memoryview, like: Tensor) -> Tensor:
    """`like` has their shape and dtype."""
    if packing.pull is None:
        return torch.frombuffer(message, dtype=like.dtype)
    with codec_numerics():
        return decode(packing.pull, torch.frombuffer(message, dtype=torch.uint8), like.shape, like.dtype)
