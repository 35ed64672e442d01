"""Initial values of parameters: each depends only on (seed, name of the parameter, logical index).
Values are drawn in chunks of 65,536, each from a separate generator. A rank can therefore compute any slice of a
parameter without the rest of it."""

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
    """Normal values of this standard deviation, or one constant if `std` is 0."""

    std: float = 0.0
    value: float = 0.0


def init_rule_for(settings: TransformerSettings, name: str) -> WeightInitRule:
    """The first line of the table whose pattern matches the name.
    A T5's embedding that is also the head has sqrt(hidden) more, which its logits are divided by. Outputs of layers in
    pre-norm models follow GPT-2's rule: less by the sqrt of the number of residual sums."""
    std, tied = settings.init_std, isinstance(settings, EncoderDecoderSettings) and settings.tied
    residual = WeightInitRule(std / sqrt(_num_residual_additions(settings, name)))
    table = {
        "*norm.weight": WeightInitRule(value=1.0),
        "*.bias": WeightInitRule(value=0.0),
        "embedding.weight": WeightInitRule(std * sqrt(settings.hidden) if tied else std),
        "*.output.weight": residual,
        "*.down.weight": residual,
        "*": WeightInitRule(std),
    }
    return next(rule for pattern, rule in table.items() if fnmatchcase(name, pattern))


def standard_normal_values(seed: int, name: str, start: int, stop: int) -> np.ndarray:
    """Elements start..stop of the standard normal values of a parameter, flattened in row-major order, in float32."""
    result = np.empty(max(0, stop - start), np.float32)
    for first in range(start - start % VALUES_PER_CHUNK, stop, VALUES_PER_CHUNK):
        low, high = max(start, first), min(stop, first + VALUES_PER_CHUNK)
        generator = np.random.Generator(np.random.Philox(derive_seed(seed, name, first // VALUES_PER_CHUNK)))
        chunk = generator.standard_normal(VALUES_PER_CHUNK, dtype=np.float32)
        result[low - start : high - start] = chunk[low - first : high - first]
    return result


def initialize_parameters(module: "nn.Module", settings: TransformerSettings, seed: int) -> None:
    """Fill every parameter of one of motet's modules with values drawn in float32 and cast to its dtype."""
    import torch

    with torch.no_grad():
        for name, parameter in module.named_parameters():
            rule = init_rule_for(settings, name)
            if rule.std == 0:
                parameter.fill_(rule.value)
                continue
            normal_values = torch.from_numpy(standard_normal_values(seed, name, 0, parameter.numel()))
            parameter.copy_(normal_values.mul_(rule.std).view(parameter.shape))


def _num_residual_additions(settings: TransformerSettings, name: str) -> int:
    """Layer outputs that are added to the residual stream which this parameter writes to."""
    if isinstance(settings, EncoderDecoderSettings) and name.startswith("decoder."):
        return 3 * (settings.decoder_layers or settings.layers)
    # The norms of a BERT encoder come after the sums.
    return 2 * settings.layers if isinstance(settings, DecoderSettings | EncoderDecoderSettings) else 1
