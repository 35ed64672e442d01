"""Text generation: one token after another, each drawn from the logits of a model, until one of them ends the text.

Keys and values of earlier tokens are cached: by motet's decoder in a `KeyValueCache`, by a model of transformers in its
own `generate`, which calls the same sampler. Without a cache, the model reads the last tokens that its context holds.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from motet.core.batch import Batch
from motet.core.errors import check_input
from motet.core.seeds import derive_seed
from motet.models.arch.key_value_cache import KeyValueCache
from motet.models.arch.loss import gather_whole_logits
from motet.models.build import TrainableModel

# On a GPU, whichever kernel a job names: a cache needs one that adds a mask, and cuDNN makes a plan for each length.
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

StopReason = Literal["end", "tokens", "context"]


@dataclass(frozen=True)
class TokenSampler:
    """Chooses a token by its score. Token n depends on (seed, n) and on the tokens before it."""

    seed: int
    temperature: float = 1.0  # 0 takes the most likely token
    top_p: float = 1.0  # Only the likeliest tokens, whose probabilities sum to this, are drawn

    def choose(self, scores: Tensor, n: int) -> int:
        """The token number n of a text, from logits [V]."""
        scores = scores.to("cpu", torch.float64)
        # NaN has no probability, nor has a score next to infinity; the first of them says where it came from.
        if self.temperature == 0 or not scores.max().isfinite():
            return int(scores.argmax())
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "sample", n))
        return int(torch.multinomial(self.probabilities(scores), 1, generator=generator))

    def probabilities(self, scores: Tensor) -> Tensor:
        """[V] in float64; tokens that are never drawn have zero, and the others may sum to less than 1."""
        # The largest is zero before the division, so that a small temperature cannot overflow
        probabilities = ((scores - scores.max()) / self.temperature).softmax(0)
        if self.top_p >= 1:
            return probabilities
        ordered, order = probabilities.sort(descending=True, stable=True)
        # A token is drawn if the likelier ones do not reach top_p without it; the likeliest always is.
        before = ordered.cumsum(0) - ordered
        is_drawn = before < self.top_p
        is_drawn[0] = True
        return torch.zeros_like(probabilities).index_copy_(0, order, ordered * is_drawn)


@dataclass
class GeneratedText:
    """The tokens of a text that is being generated."""

    sampler: TokenSampler
    count: int
    stop_ids: Collection[int] = ()
    on_token: Callable[[int], object] = lambda token: None
    on_scores: Callable[[Tensor], object] = lambda scores: None
    tokens: list[int] = field(default_factory=list)  # Without the token that ended the text
    stop: StopReason | None = None

    def add(self, scores: Tensor) -> int:
        """Choose the next token, from its logits."""
        scores = scores.to("cpu", torch.float64)
        self.on_scores(scores)
        token = self.sampler.choose(scores, len(self.tokens))
        if token in self.stop_ids:
            self.stop = "end"
            return token
        self.tokens.append(token)
        self.on_token(token)
        if len(self.tokens) == self.count:
            self.stop = "tokens"
        return token


class Generation(NamedTuple):
    """Generated tokens, and why they end."""

    tokens: list[int]
    stop: StopReason


@torch.no_grad()
def generate_tokens(
    model: TrainableModel,
    prompt: list[int],
    count: int,
    *,
    seed: int,
    temperature: float = 1,
    on_scores: Callable[[Tensor], object] | None = None,
) -> list[int]:
    """`count` tokens after those of `prompt`; the most likely ones at temperature 0.
    Beyond the context, the model reads the last tokens that its context holds."""
    check_can_continue(model, prompt, "set monitor.sample_tokens = 0")
    text = GeneratedText(TokenSampler(seed, temperature), count, on_scores=on_scores or (lambda scores: None))
    with _evaluation_mode(model.module):
        _generate_with_cache(model, prompt, text)
        while text.stop is None and count:
            window = [*prompt, *text.tokens]
            window = window if model.context is None else window[-model.context :]
            read = torch.tensor([window], device=_device(model.module))
            batch = Batch(
                read, read, torch.zeros_like(read, dtype=torch.float32), rows=torch.zeros(1, dtype=torch.long)
            )
            text.add(gather_whole_logits(model.logits(batch)[0, -1], model.module))
    return text.tokens


@torch.no_grad()
def continue_text(model: TrainableModel, prompt: list[int], text: GeneratedText) -> Generation:
    """Generate a text until it ends, has its number of tokens, or fills the context; motet's decoders and models of
    transformers cache what they have read."""
    check_can_continue(model, prompt, "give a model that predicts the next token")
    check_fits(prompt, model.context)
    with _evaluation_mode(model.module):
        if model.next_logits is not None:
            _generate_with_cache(model, prompt, text)
        else:
            _generate_with_transformers(model, prompt, text)
    return Generation(text.tokens, text.stop or "context")


def check_fits(prompt: list[int], context: int | None) -> None:
    """Refuse a prompt after which the context has no room."""
    check_input(
        context is None or len(prompt) < context,
        f"the prompt has {len(prompt)} tokens, but the context of the model holds {context}, the answer included; "
        "shorten it",
    )


def check_can_continue(model: TrainableModel, prompt: list[int], remedy: str) -> None:
    """Refuse a model that predicts no next token, and a prompt without any."""
    kind = f"{type(model.module).__name__} is not a causal decoder, so it cannot continue a text"
    check_input(model.is_autoregressive, f"{kind}; {remedy}")
    check_input(prompt, "the prompt has no token after which the text could continue; give a prompt")


def _generate_with_cache(model: TrainableModel, prompt: list[int], text: GeneratedText) -> None:
    """Generate until the context is full."""
    context, next_logits = model.context, model.next_logits
    if next_logits is None or context is None or len(prompt) > context or not text.count:
        return
    cache = KeyValueCache(min(context, len(prompt) + text.count))
    read, device = prompt, _device(model.module)
    while text.stop is None and cache.length + len(read) <= context:
        scores = next_logits(torch.tensor([read], device=device), cache)[0]
        read = [text.add(gather_whole_logits(scores, model.module))]


def _generate_with_transformers(model: TrainableModel, prompt: list[int], text: GeneratedText) -> None:
    module: Any = model.module
    transformers = import_module("transformers")

    def keep_choice(tokens: Tensor, scores: Tensor) -> Tensor:
        chosen = torch.full_like(scores, float("-inf"))
        chosen[0, text.add(scores[0])] = 0
        return chosen

    read = torch.tensor([prompt], device=_device(module))
    room = text.count if model.context is None else min(text.count, model.context - len(prompt))
    settings = transformers.GenerationConfig(
        max_new_tokens=room, do_sample=False, eos_token_id=sorted(text.stop_ids) or None, pad_token_id=0
    )
    # The folder's settings, such as a repetition penalty, would change the scores before the sampler gets them.
    defaults, module.generation_config = module.generation_config, settings
    try:
        module.generate(
            read,
            attention_mask=torch.ones_like(read),
            generation_config=settings,
            logits_processor=transformers.LogitsProcessorList([keep_choice]),
        )
    finally:
        module.generation_config = defaults


@contextmanager
def _evaluation_mode(module: nn.Module) -> Iterator[None]:
    training = module.training
    module.eval()
    try:
        with sdpa_kernel(_ATTENTION, set_priority=True) if _device(module).type == "cuda" else nullcontext():
            yield
    finally:
        module.train(training)


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device
