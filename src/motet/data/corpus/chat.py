"""Conversations as training data: the chat template of a Hugging Face tokenizer renders their messages, and only the
assistant's turns are targets.

transformers renders and tokenises, so the tokens are those of its `apply_chat_template`. A template that marks the
assistant's text with `{% generation %}` decides the targets. For any other template, the text that a turn adds to the
rendered prompt is the turn, up to the last special token in it, which ends it.
"""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from motet.core.errors import InputError

ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool", "function", "ipython")
_SHAREGPT_ROLES = {"human": "user", "gpt": ASSISTANT, "function_call": ASSISTANT, "observation": "tool"}
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # As transformers looks for it

Message = dict[str, Any]


class ConversationError(ValueError):
    """A record is not a conversation."""


class UntrainableConversationError(ValueError):
    """A conversation without anything to learn, which is skipped and counted."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a record, and the tools that its template may show."""

    messages: list[Message]
    tools: list[Any] | None
    location: object  # For messages

    def to_json(self) -> str:
        """Everything that is rendered, the same for equal conversations."""
        return json.dumps([self.messages, self.tools] if self.tools else self.messages, sort_keys=True, default=str)


class EncodedConversation(NamedTuple):
    """The tokens of a conversation, and which of them the assistant wrote."""

    tokens: list[int]
    is_target: NDArray[np.bool_]


# --- records --------------------------------------------------------------------------------------------


def parse_conversation(turns: object, tools: object, location: object) -> Conversation:
    """The messages of a record: `role` and `content`, or `from` and `value`, each."""
    if not isinstance(turns, list):
        raise ConversationError(f"is {_short(turns)}, not a list of messages")
    messages = [_parse_message(turn, number) for number, turn in enumerate(turns, 1)]
    if isinstance(tools, str):  # Parquet has no column of JSON schemas, so some write their text
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError:
            raise ConversationError(f"has tools that are not JSON: {_short(tools)}") from None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ConversationError(f"has tools that are {_short(tools)}, not a list of JSON schemas")
    if not any(message["role"] == ASSISTANT for message in messages):
        raise UntrainableConversationError("without a turn of the assistant")
    for message in messages:
        if message["role"] in ("user", ASSISTANT) and not (message.get("content") or message.get("tool_calls")):
            raise UntrainableConversationError("with an empty message")
    return Conversation(messages, tools or None, location)


def _parse_message(turn: object, number: int) -> Message:
    if not isinstance(turn, dict):
        raise ConversationError(f"has the message {number} {_short(turn)}, not an object with role and content")
    values = {key: value for key, value in turn.items() if value is not None}  # Parquet has all keys of all messages
    if "role" not in values and "from" in values:
        role, content = values.pop("from"), values.pop("value", None)
        values["role"] = _SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
        values |= {} if content is None else {"content": content}
    role, content = values.get("role"), values.get("content")
    if role not in ROLES:
        shown = "no role" if role is None else f"the role {_short(role)}"
        raise ConversationError(f"has the message {number} with {shown}; known are {', '.join(ROLES)}")
    if isinstance(content, str):
        return {**values, "content": _encodable(content)}
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        return {**values, "content": [{**part, "text": _encodable(part["text"])} for part in content]}
    if content is None and values.get("tool_calls"):
        return values
    shown = "no content" if content is None else f"the content {_short(content)}, which is not a text"
    raise ConversationError(f"has the message {number} of the role {role!r} with {shown}")


def _encodable(text: str) -> str:
    # Half of a surrogate pair is valid in JSON, but no tokenizer takes it.
    return text.encode("utf-8", "replace").decode("utf-8")


def _short(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else f"{text[:37]}..."


# --- tokens ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChatTokenizer:
    """transformers' tokenizer of a folder, which has a chat template."""

    backend: Any
    folder: Path

    def encode_prompt(self, messages: list[Message]) -> list[int]:
        """The tokens of messages, and of the header after which the assistant answers."""
        with self._report_template_errors("the prompt"):
            text = self._render(messages, None, add_generation_prompt=True)
        return list(self.backend(text, add_special_tokens=False)["input_ids"])

    def turn_end(self) -> int | None:
        """The special token that ends a turn of the assistant; None if the template puts none."""
        messages = [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "b"}]
        [encoded] = self.encode([Conversation(messages, None, "the prompt")])
        last = [token for token, is_target in zip(encoded.tokens, encoded.is_target, strict=True) if is_target][-1:]
        special = self.backend.added_tokens_decoder
        return next((token for token in last if token in special), None)

    def encode(self, conversations: list[Conversation]) -> list[EncodedConversation]:
        """The tokens and targets of conversations. Texts are tokenised together, on the threads of `tokenizers`."""
        results: dict[int, EncodedConversation] = {}
        texts: list[str] = []
        turns: list[list[tuple[int, int]]] = []
        plain: list[int] = []
        for index, conversation in enumerate(conversations):
            with self._report_template_errors(conversation.location):
                if _GENERATION.search(self.backend.get_chat_template(None, conversation.tools)):
                    results[index] = self._encode_marked(conversation)
                    continue
                text, spans = self._render_turns(conversation)
            texts.append(text)
            turns.append(spans)
            plain.append(index)
        if texts:
            encoded = self.backend(texts, add_special_tokens=False, return_offsets_mapping=True)
            columns = encoded["input_ids"], encoded["offset_mapping"], texts, turns
            for index, tokens, offsets, text, spans in zip(plain, *columns, strict=True):
                targets = _tokens_in_spans(offsets, (self._trim(text, *span) for span in spans))
                results[index] = EncodedConversation(tokens, targets)
        return [results[index] for index in range(len(conversations))]

    def _encode_marked(self, conversation: Conversation) -> EncodedConversation:
        encoded = self.backend.apply_chat_template(
            conversation.messages, conversation.tools, return_dict=True, return_assistant_tokens_mask=True
        )
        return EncodedConversation(encoded["input_ids"], np.array(encoded["assistant_masks"], np.bool_))

    def _render_turns(self, conversation: Conversation) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and where the assistant's turns begin and end in it."""
        messages, tools = conversation.messages, conversation.tools
        text, spans = self._render(messages, tools), []
        for index in (i for i, message in enumerate(messages) if message["role"] == ASSISTANT):
            is_last = index + 1 == len(messages)
            answered = text if is_last else self._render(messages[: index + 1], tools)
            prompt = self._render_prompt(conversation, text, index)
            if not answered.startswith(prompt) or not text.startswith(answered):
                problem = (
                    f"the chat template of {self.folder} renders message {index + 1} differently "
                    + ("after its prompt" if text.startswith(answered) else "when other messages follow")
                    + ", so the assistant's text cannot be told from the prompt"
                )
                raise InputError(f"{conversation.location}: {problem}; mark it with {{% generation %}} in the template")
            spans.append((len(prompt), len(answered)))
        return text, spans

    def _render_prompt(self, conversation: Conversation, text: str, index: int) -> str:
        """The text before the answer that is this message. Nothing comes before the first, of which the header counts
        as prompt: the text that asks for an answer after it."""
        messages, tools = conversation.messages, conversation.tools
        if index:
            return self._render(messages[:index], tools, add_generation_prompt=True)
        first = self._render(messages[:1], tools)
        header = self._render(messages[:1], tools, add_generation_prompt=True).removeprefix(first)
        before, found_header, _ = text.partition(header) if header else ("", "", "")
        return before + found_header if found_header else ""

    def _render(self, messages: list[Message], tools: list[Any] | None, *, add_generation_prompt: bool = False) -> str:
        text = self.backend.apply_chat_template(
            messages, tools, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return str(text)

    def _trim(self, text: str, start: int, stop: int) -> tuple[int, int]:
        """The span without blanks after a special token at its end: they separate turns, and nobody generates them."""
        end = start + len(text[start:stop].rstrip())
        ends_turn = any(
            text.startswith(name, end - len(name)) for name in self._special_names if len(name) <= end - start
        )
        return start, end if ends_turn else stop

    @cached_property
    def _special_names(self) -> list[str]:
        names = (token.content for token in self.backend.added_tokens_decoder.values())
        return [name for name in names if name.strip()]

    @contextmanager
    def _report_template_errors(self, location: object) -> Iterator[None]:
        try:
            yield
        except InputError:
            raise
        except Exception as error:  # noqa: BLE001  # a template may raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InputError(
                f"{location}: the chat template of {self.folder} refuses the conversation: {reason}; change the "
                "messages or the template"
            ) from None


def load_chat_tokenizer(folder: Path) -> ChatTokenizer:
    """The tokenizer of a folder as transformers loads it."""
    try:
        auto = import_module("transformers").AutoTokenizer
    except ImportError:
        raise InputError("conversations are rendered by the package `transformers`; install motet[hf]") from None
    try:
        backend = auto.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # noqa: BLE001  # the library has different errors for every kind of tokenizer
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"transformers cannot load the tokenizer in {folder}: {reason}; save it again") from None
    return ChatTokenizer(backend, folder)


def _tokens_in_spans(offsets: list[tuple[int, int]], spans: Iterable[tuple[int, int]]) -> NDArray[np.bool_]:
    """Tokens that share a character with a span [start, stop) of the text. A byte-level tokenizer leaves blanks out of
    the offsets; they belong to the token after them."""
    stops = np.maximum.accumulate(np.array([stop for _, stop in offsets], np.int64))
    starts = np.append(0, stops[:-1])
    # Tokens that are bytes of one character share its place.
    starts = np.minimum(starts, np.where(stops > starts, starts, np.array([start for start, _ in offsets], np.int64)))
    is_inside = np.zeros(len(offsets), np.bool_)
    for start, stop in spans:
        is_inside |= (starts < stop) & (stops > start)
    return is_inside
