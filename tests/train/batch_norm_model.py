"""Modules as a user would write them, for `model.factory`."""

from torch import Tensor, nn


class WithBatchNorm(nn.Module):
    """Its running mean and variance are buffers, which each rank fills from the rows that it reads."""

    def __init__(self, vocab_size: int, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        normed: Tensor = self.norm(self.embedding(tokens).transpose(1, 2)).transpose(1, 2)
        logits: Tensor = self.head(normed)
        return logits
