"""Text from tokens as they come: characters whose last bytes are still to come wait for them."""

from dataclasses import dataclass, field

from motet.data.corpus.tokenizer import Tokenizer

_CONTEXT_TOKENS = 8  # Tokens of the prompt, by which a decoder knows whether a word begins in the middle of a text


@dataclass
class TextStream:
    """The text of tokens that follow a prompt."""

    tokenizer: Tokenizer
    prompt: list[int]
    _pending: list[int] = field(default_factory=list)
    _context: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._context = self.prompt[-_CONTEXT_TOKENS:]

    def add(self, token: int) -> str:
        """The text that is complete with this token."""
        self._pending.append(token)
        text = self._text()
        # A replacement character may become another one with the next byte. No character has more than four bytes.
        if text.endswith("\ufffd") and len(self._pending) <= 4:
            return ""
        return self._take(text)

    def rest(self) -> str:
        """The text of the last tokens, complete or not."""
        return self._take(self._text())

    def _text(self) -> str:
        before = self.tokenizer.decode(self._context)
        return self.tokenizer.decode([*self._context, *self._pending])[len(before) :]

    def _take(self, text: str) -> str:
        self._context, self._pending = [*self._context, *self._pending][-_CONTEXT_TOKENS:], []
        return text
