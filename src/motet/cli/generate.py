"""`motet generate`: let a trained model continue a text, or answer a message."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from motet.cli.output import log
from motet.core.errors import check_input, convert_os_errors
from motet.monitor.stdout_stderr import print_json, stdout_console

if TYPE_CHECKING:
    import torch

    from motet.data.corpus.text_stream import TextStream
    from motet.data.corpus.tokenizer import Tokenizer
    from motet.train.stored_model import StoredLanguageModel


def generate_command(  # noqa: PLR0913 - a command's options
    *,
    model: Annotated[
        Path, Argument(metavar="RUN|FOLDER", help="A run, one of its checkpoints, or a Hugging Face folder.")
    ],
    prompt: Annotated[str, Argument(help="The text to continue.")],
    tokens: Annotated[int, Option(min=1, help="The most tokens to generate.")] = 100,
    temperature: Annotated[float, Option(min=0, help="0 takes the most likely token each time.")] = 0.8,
    top_p: Annotated[float, Option(help="Draw only the likeliest tokens that reach this probability together.")] = 0.95,
    seed: Annotated[int, Option(help="Another seed gives another text.")] = 0,
    chat: Annotated[
        bool, Option("--chat", help="Answer the prompt as a user's message, with the chat template.")
    ] = False,
    device: Annotated[Literal["auto", "cpu", "cuda"], Option(help="auto: a GPU if there is one.")] = "auto",
    json: Annotated[bool, Option("--json", help="Print the text and its tokens as JSON, when it ends.")] = False,
) -> None:
    """Continue a text with the newest checkpoint of a run, or with a Hugging Face folder."""
    check_input(prompt, "the prompt is empty; give the text that the model should continue")
    check_input(0 < top_p <= 1, f"--top-p {top_p:g}: give a number above 0, up to 1, which allows every token")
    from motet.data.corpus.text_stream import TextStream
    from motet.models.generation import GeneratedText, TokenSampler, continue_text
    from motet.train.stored_model import open_language_model

    read: list[int] = []  # The tokens of the prompt
    with convert_os_errors(f"read {model}", "make it readable for this user"):
        stored = open_language_model(
            model,
            _device(device),
            log,
            use_tokenizer=lambda tokenizer, context: read.extend(_encode(tokenizer, context, prompt, is_chat=chat)),
        )
    ends, sampler = _end_ids(stored, is_chat=chat), TokenSampler(seed, temperature, top_p)
    printer = _TextPrinter(TextStream(stored.tokenizer, read), is_silent=json)
    text = GeneratedText(sampler, tokens, ends, on_token=printer.add)
    start = time.perf_counter()
    with stored.numerics():
        generated = continue_text(stored.model, read, text)
    printer.finish()
    if json:
        facts = {"text": printer.text, "stop": generated.stop, "prompt_tokens": read, "tokens": generated.tokens}
        speed = len(generated.tokens) / (time.perf_counter() - start)
        source = {"source": str(stored.source), "step": stored.step}
        print_json({"prompt": prompt, **facts, "tokens_per_s": speed, **source})
    elif generated.stop != "tokens":
        reason = (
            "the text ended" if generated.stop == "end" else f"the context of {stored.model.context} tokens is full"
        )
        log(f"{reason} after {len(generated.tokens)} tokens")


class _TextPrinter:
    """Prints the text of tokens as they come."""

    def __init__(self, stream: TextStream, *, is_silent: bool) -> None:
        self.text, self._stream, self._is_silent = "", stream, is_silent

    def add(self, token: int) -> None:
        self._print(self._stream.add(token))

    def finish(self) -> None:
        """Print what is left, and end the line."""
        self._print(self._stream.rest())
        if not self._is_silent:
            stdout_console().out("", highlight=False)

    def _print(self, text: str) -> None:
        self.text += text
        if not self._is_silent and text:
            stdout_console().out(text, end="", highlight=False)
            stdout_console().file.flush()


def _device(name: str) -> torch.device:
    import torch

    has_gpu = torch.cuda.is_available()
    check_input(name != "cuda" or has_gpu, "--device cuda: this machine has no GPU that torch can use; leave it out")
    return torch.device("cuda" if name != "cpu" and has_gpu else "cpu")


def _encode(tokenizer: Tokenizer, context: int | None, prompt: str, *, is_chat: bool) -> list[int]:
    """The tokens of the prompt, after those with which documents begin."""
    from motet.models.generation import check_fits

    tokens = [*tokenizer.begin_ids, *tokenizer.encode(prompt)]
    if is_chat:
        tokens = tokenizer.chat.encode_prompt([{"role": "user", "content": prompt}])
    check_fits(tokens, context)
    return tokens


def _end_ids(stored: StoredLanguageModel, *, is_chat: bool) -> set[int]:
    """The tokens that end the text; in a chat, also the one that ends a turn."""
    tokenizer = stored.tokenizer
    turn = tokenizer.chat.turn_end() if is_chat else None
    return {tokenizer.end_id, *stored.end_ids, *([] if turn is None else [turn])}
