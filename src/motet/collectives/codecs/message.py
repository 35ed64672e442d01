"""A tensor to a message and back, for every codec: a flat uint8 tensor of exactly `codec.wire_bytes(shape, dtype)`.

What is random follows from `seed`: whoever decodes random-k needs the seed of whoever encoded. A number that is not
finite makes at least one decoded number not finite.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from motet.collectives.codecs import float8, low_rank, quantise, sign, sparse
from motet.collectives.codecs.wire import name_of
from motet.collectives.compress import Codec, Float8, Integers, PowerSGD, RandomK, Sign, TopK


def encode(codec: Codec, tensor: Tensor, seed: int = 0) -> Tensor:
    size = codec.wire_bytes(tensor.shape, name_of(tensor.dtype))
    message = _encode(codec, tensor.detach(), seed)
    assert message.dtype == torch.uint8
    assert message.shape == (size,)
    return message


def _encode(codec: Codec, tensor: Tensor, seed: int) -> Tensor:
    match codec:
        case Integers():
            return quantise.encode(codec, tensor, seed)
        case Float8():
            return float8.encode(codec, tensor)
        case Sign():
            return sign.encode(codec, tensor)
        case TopK():
            return sparse.encode_top(codec, tensor)
        case RandomK():
            return sparse.encode_random(codec, tensor, seed)
        case PowerSGD():
            return low_rank.encode(codec, tensor, seed)
    raise AssertionError(codec)


def decode(codec: Codec, message: Tensor, shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """`dtype` is that of the encoded tensor; where the codec's bytes do not depend on it, any other one will do."""
    assert message.shape == (codec.wire_bytes(shape, name_of(dtype)),), "a message of another codec, shape or dtype"
    match codec:
        case Integers():
            return quantise.decode(codec, message, shape, dtype)
        case Float8():
            return float8.decode(codec, message, shape, dtype)
        case Sign():
            return sign.decode(codec, message, shape, dtype)
        case TopK():
            return sparse.decode_top(message, shape, dtype)
        case RandomK():
            return sparse.decode_random(codec, message, shape, dtype, seed)
        case PowerSGD():
            return low_rank.decode(codec, message, shape, dtype)
    raise AssertionError(codec)
