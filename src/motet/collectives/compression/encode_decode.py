"""A tensor to a message and back, for every codec: a flat uint8 tensor of exactly `codec.wire_bytes(shape, dtype)`.

What is random follows from `seed`: whoever decodes random-k needs the seed of whoever encoded. A number that is not
finite makes at least one decoded number not finite.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from motet.collectives.compression import float8, int_quantize, powersgd, sign, sparsify
from motet.collectives.compression.byte_messages import dtype_name
from motet.collectives.compression.codec_options import (
    CodecOptions,
    Float8CodecOptions,
    IntegerCodecOptions,
    PowerSGDCodecOptions,
    RandomKCodecOptions,
    SignCodecOptions,
    TopKCodecOptions,
)


def encode(codec: CodecOptions, tensor: Tensor, seed: int = 0) -> Tensor:
    size = codec.wire_bytes(tensor.shape, dtype_name(tensor.dtype))
    message = _encode_by_codec(codec, tensor.detach(), seed)
    assert message.dtype == torch.uint8
    assert message.shape == (size,)
    return message


def _encode_by_codec(codec: CodecOptions, tensor: Tensor, seed: int) -> Tensor:
    match codec:
        case IntegerCodecOptions():
            return int_quantize.encode(codec, tensor, seed)
        case Float8CodecOptions():
            return float8.encode(codec, tensor)
        case SignCodecOptions():
            return sign.encode(codec, tensor)
        case TopKCodecOptions():
            return sparsify.encode_top_k(codec, tensor)
        case RandomKCodecOptions():
            return sparsify.encode_random_k(codec, tensor, seed)
        case PowerSGDCodecOptions():
            return powersgd.encode(codec, tensor, seed)
    raise AssertionError(codec)


def decode(codec: CodecOptions, message: Tensor, shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """`dtype` is that of the encoded tensor; where the codec's bytes do not depend on it, any other one will do."""
    assert message.shape == (codec.wire_bytes(shape, dtype_name(dtype)),), "a message of another codec, shape or dtype"
    match codec:
        case IntegerCodecOptions():
            return int_quantize.decode(codec, message, shape, dtype)
        case Float8CodecOptions():
            return float8.decode(codec, message, shape, dtype)
        case SignCodecOptions():
            return sign.decode(codec, message, shape, dtype)
        case TopKCodecOptions():
            return sparsify.decode_top_k(message, shape, dtype)
        case RandomKCodecOptions():
            return sparsify.decode_random_k(codec, message, shape, dtype, seed)
        case PowerSGDCodecOptions():
            return powersgd.decode(codec, message, shape, dtype)
    raise AssertionError(codec)
