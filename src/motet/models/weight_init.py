"""Initial values of our models: each depends on (seed, name of the parameter, logical index) and on nothing else.

Values are drawn in chunks of 65,536, each from a generator of its own, so that any stretch of a parameter can be
computed without the rest of it: by the rank that holds it, in whatever order.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import sqrt
from typing import TYPE_CHECKING

import numpy as np

from motet.core.seeds import derive_seed
from motet.models.settings import DecoderSettings, EncoderDecoderSettings, TransformerSettings

if TYPE_CHECKING:
    from torch import nn

VALUES_PER_CHUNK = 65_536


@dataclass(frozen=True)
class WeightInitRule:
    """Normal values of this standard deviation, or one value throughout (`std` 0)."""

    std: float = 0.0
    value: float = 0.0


def init_rule_for(settings: TransformerSettings, name: str) -> WeightInitRule:
    """The first line of the table whose pattern matches the name.

    *norm.weight                      1
    *.bias                            0
    embedding.weight of a T5-style    init_std sqrt(hidden), if it is also the head: logits are divided by that
    *.output.weight, *.down.weight    init_std / sqrt(residual sums), where norms come before layers (GPT-2's rule)
    everything else                   init_std
    """
    std = settings.init_std
    tied = isinstance(settings, EncoderDecoderSettings) and settings.tied
    table = {
        "*norm.weight": WeightInitRule(value=1.0),
        "*.bias": WeightInitRule(value=0.0),
        "embedding.weight": WeightInitRule(std * sqrt(settings.hidden) if tied else std),
        "*.output.weight": WeightInitRule(std / sqrt(_num_residual_additions(settings, name))),
        "*.down.weight": WeightInitRule(std / sqrt(_num_residual_additions(settings, name))),
        "*": WeightInitRule(std),
    }
    return next(rule for pattern, rule in table.items() if fnmatchcase(name, pattern))


def standard_normal_values(seed: int, name: str, start: int, stop: int) -> np.ndarray:
    """Elements start..stop of the standard normal values of a parameter, flattened in row-major order, in float32."""
    result = np.empty(max(0, stop - start), np.float32)
    for first in range(start - start % VALUES_PER_CHUNK, stop, VALUES_PER_CHUNK):
        low, high = max(start, first), min(stop, first + VALUES_PER_CHUNK)
        result[low - start : high - start] = _normal_chunk(seed, name, first // VALUES_PER_CHUNK)[
            low - first : high - first
        ]
    return result


def initialize_parameters(module: "nn.Module", settings: TransformerSettings, seed: int) -> None:
    """Fill every parameter of one of our modules. Values are drawn in float32 and cast to what the parameter is."""
    import torch

    with torch.no_grad():
        for name, parameter in module.named_parameters():
            rule = init_rule_for(settings, name)
            if rule.std == 0:
                parameter.fill_(rule.value)
                continue
            normal_values = torch.from_numpy(standard_normal_values(seed, name, 0, parameter.numel()))
            parameter.copy_(normal_values.mul_(rule.std).view(parameter.shape))


def _normal_chunk(seed: int, name: str, chunk: int) -> np.ndarray:
    generator = np.random.Generator(np.random.Philox(derive_seed(seed, name, chunk)))
    return generator.standard_normal(VALUES_PER_CHUNK, dtype=np.float32)


def _num_residual_additions(settings: TransformerSettings, name: str) -> int:
    """How many times a layer's output is added to the stream that this parameter writes to."""
    match settings:
        case DecoderSettings():
            return 2 * settings.layers
        case EncoderDecoderSettings() if name.startswith("decoder."):
            return 3 * (settings.decoder_layers or settings.layers)
        case EncoderDecoderSettings():
            return 2 * settings.layers
        case _:
            return 1  # an encoder's norms come after the sums
