"""Initial values of parameters: each depends only on (seed, name of the parameter, logical index).
Values are drawn in chunks of 65,536, each from a separate generator. A rank can therefore compute any slice of a
parameter without the rest of it."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import product
from math import prod, sqrt

import numpy as np

from motet.core.seeds import derive_seed
from motet.models.settings import DecoderSettings, EncoderDecoderSettings, TransformerSettings

VALUES_PER_CHUNK = 65_536
TensorBox = tuple[tuple[int, ...], tuple[int, ...]]  # Offsets and lengths along the dimensions of the whole tensor


@dataclass(frozen=True)
class WeightInitRule:
    """Normal values of this standard deviation, or one constant if `std` is 0."""

    std: float = 0.0
    value: float = 0.0
    divisor: float = 1.0  # Divides the normal values, after the multiplication by `std`


def init_rule_for(settings: TransformerSettings, name: str) -> WeightInitRule:
    """The first line of the table whose pattern matches the name.
    A T5's embedding that is also the head is larger by sqrt(hidden), by which its logits are divided. Outputs of layers
    in pre-norm models follow GPT-2's rule: smaller by the sqrt of the number of residual sums."""
    std, tied = settings.init_std, isinstance(settings, EncoderDecoderSettings) and settings.tied
    residual = WeightInitRule(std / sqrt(_num_residual_additions(settings, name)))
    table = {
        "*norm.weight": WeightInitRule(value=1.0),
        "*.bias": WeightInitRule(value=0.0),
        "embedding.weight": WeightInitRule(std * sqrt(settings.hidden) if tied else std),
        "*.output.weight": residual,
        "*.down.weight": residual,
        "*.experts.down": residual,
        "*": WeightInitRule(std),
    }
    return next(rule for pattern, rule in table.items() if fnmatchcase(name, pattern))


def adapter_init_rule(name: str, shape: tuple[int, ...]) -> WeightInitRule | None:
    """The rule of a parameter that an adapter has added; B is zero at first."""
    if name.endswith(".adapter_a"):
        return WeightInitRule(1.0, divisor=shape[1] ** 0.5)
    return WeightInitRule() if name.endswith(".adapter_b") else None


def standard_normal_values(seed: int, name: str, start: int, stop: int) -> np.ndarray:
    """Elements start..stop of the standard normal values of a parameter, flattened in row-major order, in float32."""
    result = np.empty(max(0, stop - start), np.float32)
    for first in range(start - start % VALUES_PER_CHUNK, stop, VALUES_PER_CHUNK):
        low, high = max(start, first), min(stop, first + VALUES_PER_CHUNK)
        chunk = _standard_normal_chunk(seed, name, first // VALUES_PER_CHUNK)
        result[low - start : high - start] = chunk[low - first : high - first]
    return result


# Several ranges of one chunk are read one after another, such as the rows of a tensor that is split into columns.
@lru_cache(maxsize=1)
def _standard_normal_chunk(seed: int, name: str, index: int) -> np.ndarray:
    generator = np.random.Generator(np.random.Philox(derive_seed(seed, name, index)))
    return generator.standard_normal(VALUES_PER_CHUNK, dtype=np.float32)


def standard_normal_box(seed: int, name: str, shape: tuple[int, ...], *, box: TensorBox) -> np.ndarray:
    """The standard normal values of a box of a parameter of this shape."""
    offsets, lengths = box
    # Dimensions after `dim` are complete in the box, so it consists of runs of the flat parameter.
    dim = next((dim for dim in range(len(shape) - 1, 0, -1) if lengths[dim] != shape[dim]), 0)
    strides, run = [prod(shape[i + 1 :]) for i in range(len(shape))], prod(lengths[dim:])
    rows = product(*(range(first, first + n) for first, n in zip(offsets[:dim], lengths[:dim], strict=True)))
    starts = [sum(i * n for i, n in zip((*row, *offsets[dim:]), strides, strict=True)) for row in rows]
    values = np.empty((len(starts), run), np.float32)
    for row_values, start in zip(values, starts, strict=True):
        row_values[:] = standard_normal_values(seed, name, start, start + run)
    return values.reshape(lengths)


def _num_residual_additions(settings: TransformerSettings, name: str) -> int:
    """Layer outputs that are added to the residual stream which this parameter writes to."""
    if isinstance(settings, EncoderDecoderSettings) and name.startswith("decoder."):
        return 3 * (settings.decoder_layers or settings.layers)
    # The norms of a BERT encoder come after the sums.
    return 2 * settings.layers if isinstance(settings, DecoderSettings | EncoderDecoderSettings) else 1
