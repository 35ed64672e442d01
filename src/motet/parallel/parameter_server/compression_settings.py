"""Which codec compresses pushed gradients and pulled parameters."""

from dataclasses import dataclass

from motet.collectives.compression.codec_base import BlockwiseCodec, Codec
from motet.collectives.compression.codec_registry import parse_codec
from motet.collectives.compression.powersgd import PowerSGDCodec
from motet.collectives.compression.sparse_codecs import RandomKCodec
from motet.core.errors import InputError


@dataclass(frozen=True)
class PushPullCompression:
    """The codecs of pushes and pulls; None sends the tensor uncompressed."""

    push_codec: Codec | None = None
    pull_codec: Codec | None = None
    has_error_feedback: bool = True
    seed: int = 0


NO_COMPRESSION = PushPullCompression()


def parse_codecs(*texts: str | None) -> list[Codec | None]:
    return [parse_codec(text) if text else None for text in texts]


def check_codecs(compress_pushes: str | None, compress_pulls: str | None, has_error_feedback: bool) -> None:
    """Raise InputError for codecs that are unknown, or that cannot compress pushes or pulls."""
    for name, text in (("compress_pushes", compress_pushes), ("compress_pulls", compress_pulls)):
        key = f"layout.server.{name} = {text!r}"
        try:
            codec = parse_codecs(text)[0]
        except InputError as error:
            raise InputError(f"{key}: {error}") from None
        if name == "compress_pulls" and codec is not None and not isinstance(codec, BlockwiseCodec):
            raise InputError(f"{key} would leave most of a parameter out; use int8, int4 or float8")
        if isinstance(codec, PowerSGDCodec):
            raise InputError(f"{key} needs unsharded matrices, and servers have slices; use int8, int4, float8 or topk")
        if isinstance(codec, RandomKCodec) and codec.unbiased and has_error_feedback:
            raise InputError(
                f"{key}: error feedback would make its errors grow; use randomk:unbiased=false, or "
                "layout.server.error_feedback=false"
            )
