"""Text generation, one token after another."""

import torch
from torch import Tensor

from motet.core.batch import Batch
from motet.core.errors import check_input
from motet.core.seeds import derive_seed
from motet.models.arch.vocabulary_shard import gather_whole_logits
from motet.models.build import TrainableModel


@torch.no_grad()
def generate_tokens(
    model: TrainableModel, prompt: list[int], count: int, *, seed: int, temperature: float = 1
) -> list[int]:
    """`count` tokens after those of `prompt`; the most likely ones at temperature 0.
    The model reads the last tokens that its context holds. Token n depends on (seed, n) and on the tokens before it."""
    other_kind = "only a causal decoder can continue a text; set monitor.sample_tokens = 0 for other models"
    check_input(model.is_autoregressive, other_kind)
    check_input(prompt, "a text can only be continued after at least one token; give a prompt")
    device = next(model.module.parameters()).device
    tokens, training = list(prompt), model.module.training
    model.module.eval()
    try:
        for n in range(count):
            window = tokens if model.context is None else tokens[-model.context :]
            read = torch.tensor([window], device=device)
            batch = Batch(read, read, torch.zeros(read.shape, device=device), rows=torch.zeros_like(read[:, 0]))
            last = gather_whole_logits(model.logits(batch)[0, -1], model.module)
            scores = last.to("cpu", torch.float64)
            tokens.append(_sample_token(scores, temperature, seed=derive_seed(seed, "sample", n)))
    finally:
        model.module.train(training)
    return tokens[len(prompt) :]


def _sample_token(scores: Tensor, temperature: float, *, seed: int) -> int:
    if temperature == 0:
        return int(scores.argmax())
    return int(torch.multinomial((scores / temperature).softmax(0), 1, generator=torch.Generator().manual_seed(seed)))
