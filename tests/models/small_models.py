"""Small models of our architectures, built on the CPU."""

import torch

from motet.models.build import TrainableModel, build_trainable_model
from motet.models.settings import ModelSettings

SIZES = {"vocab_size": 30, "context": 16, "layers": 2, "hidden": 16, "heads": 4, "ffn_hidden": 24}


def built(settings: ModelSettings, seed: int = 0, dtype: torch.dtype = torch.float32) -> TrainableModel:
    return build_trainable_model(settings, seed, dtype, torch.device("cpu"))
