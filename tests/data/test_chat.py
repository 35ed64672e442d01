"""Conversations: the tokens of transformers' apply_chat_template, and targets in the assistant's turns alone."""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_tokenizers import STYLES, write_chat_tokenizer
from corpora import settings, write_records

from motet.data.corpus.build import CorpusBuildSpec, build_corpus
from motet.data.corpus.chat import Conversation, parse_conversation
from motet.data.corpus.discover import discover_corpus
from motet.data.corpus.prepare import prepare_data
from motet.data.corpus.token_store import open_built_corpus, read_corpus_manifest
from motet.data.corpus.tokenizer import Tokenizer, load_tokenizer
from motet.data.samples.loader import BatchLoader
from motet.data.settings import DataSourceSettings
from refusals import refused

transformers = pytest.importorskip("transformers")

Messages = list[dict[str, Any]]
TWO_TURNS = [
    {"role": "user", "content": "Hello  there \u00e9 \U0001f600?"},
    {"role": "assistant", "content": "Fine, thanks.\n 2 + 2"},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is four \U0001f600"},
]
# What counts of TWO_TURNS, in each style.
COUNTED = {
    "chatml": ["Fine, thanks.\n 2 + 2<|im_end|>", "It is four \U0001f600<|im_end|>"],
    "chatml-marked": ["Fine, thanks.\n 2 + 2<|im_end|>", "It is four \U0001f600<|im_end|>"],
    "llama3": ["Fine, thanks.\n 2 + 2<|eot_id|>", "It is four \U0001f600<|eot_id|>"],
    "gemma": ["Fine, thanks.\n 2 + 2<end_of_turn>", "It is four \U0001f600<end_of_turn>"],
    "mistral": [" Fine, thanks.\n 2 + 2</s>", " It is four \U0001f600</s>"],
    "plain": [" Fine, thanks.\n 2 + 2\n", " It is four \U0001f600\n"],  # a blank shares a token with the first word
}


def counted_texts(tokenizer: Tokenizer, tokens: list[int], is_target: Any) -> list[str]:
    runs = groupby(range(len(tokens)), lambda i: bool(is_target[i]))
    return [tokenizer.decode([tokens[i] for i in run]) for counts, run in runs if counts]


def chat(messages: Messages) -> dict[str, Any]:
    return {"messages": messages}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("count", [2, 4])
def test_tokens_and_targets_of_a_template(style: str, count: int, tmp_path: Path) -> None:
    folder = write_chat_tokenizer(tmp_path, style)
    tokenizer, theirs = load_tokenizer(str(folder)), transformers.AutoTokenizer.from_pretrained(folder)
    conversations = [parse_conversation(TWO_TURNS[:count], None, "x"), parse_conversation(TWO_TURNS[2:], None, "y")]
    for conversation, encoded in zip(conversations, tokenizer.chat.encode(conversations), strict=True):
        assert encoded.tokens == theirs.apply_chat_template(conversation.messages, tokenize=True)["input_ids"]
    first, second = tokenizer.chat.encode(conversations)
    texts = counted_texts(tokenizer, first.tokens, first.is_target)
    expected = COUNTED[style][: count // 2]
    if style == "plain":
        texts = [text.strip(" ") for text in texts]
        expected = [text.strip(" ") for text in expected]
    assert texts == expected
    assert counted_texts(tokenizer, second.tokens, second.is_target)[0].strip() == COUNTED[style][1].strip()
    prompt = theirs.apply_chat_template(TWO_TURNS[:1], add_generation_prompt=True)["input_ids"]
    assert tokenizer.chat.encode_prompt(TWO_TURNS[:1]) == prompt


def test_system_messages_tools_and_tool_calls(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}
    messages: Messages = [
        {"role": "system", "content": ""},
        {"role": "user", "content": "What time is it?", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "12:00"},
        {"role": "assistant", "content": "Noon."},
    ]
    tokenizer = load_tokenizer(str(write_chat_tokenizer(tmp_path / "a", "chatml")))
    [encoded] = tokenizer.chat.encode([parse_conversation(messages, None, "x")])
    assert counted_texts(tokenizer, encoded.tokens, encoded.is_target) == [
        "<tool_call>clock</tool_call><|im_end|>",
        "Noon.<|im_end|>",
    ]
    folder, tools = (
        write_chat_tokenizer(tmp_path / "b", "llama3"),
        [{"type": "function", "function": {"name": "clock"}}],
    )
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for given in (tools, json.dumps(tools)):
        [encoded] = load_tokenizer(str(folder)).chat.encode([parse_conversation(TWO_TURNS, given, "x")])
        assert encoded.tokens == theirs.apply_chat_template(TWO_TURNS, tools)["input_ids"]
    assert "clock" in theirs.decode(encoded.tokens)


def test_a_conversation_that_the_assistant_begins(tmp_path: Path) -> None:
    messages = [{"role": "assistant", "content": "Hello!"}, *TWO_TURNS]
    for style in ("chatml", "llama3", "mistral", "chatml-marked"):
        tokenizer = load_tokenizer(str(write_chat_tokenizer(tmp_path / style, style)))
        [encoded] = tokenizer.chat.encode([parse_conversation(messages, None, "x")])
        first = counted_texts(tokenizer, encoded.tokens, encoded.is_target)[0]
        assert first.startswith({"mistral": "<s> Hello!"}.get(style, "Hello!")), style


RECORDS = [
    chat(TWO_TURNS),
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]},
    chat(TWO_TURNS[:1]),
    chat([{"role": "user", "content": ""}, {"role": "assistant", "content": "What?"}]),
    chat([]),
    {"prompt": "2 + 2 =", "answer": " 4"},
    {"text": "Plain text"},
]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_corpus_of_conversations_and_others(kind: str, tmp_path: Path) -> None:
    folder, records = write_chat_tokenizer(tmp_path / "tokenizer", "chatml"), RECORDS
    if kind == "parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        records = [*RECORDS[:1], *RECORDS[2:4]]
        path = tmp_path / "chats.parquet"
        parquet.write_table(pyarrow.Table.from_pylist(records), path)
    else:
        path = write_records(tmp_path / "chats.jsonl", records)
    tokenizer, out = load_tokenizer(str(folder)), tmp_path / "built"
    spec = CorpusBuildSpec(discover_corpus(str(path)), DataSourceSettings(source=str(path)), False, tokenizer, 0)
    manifest = build_corpus(spec, out, workers=1, progress=lambda *_: None)
    skipped = {"without a turn of the assistant": 2, "with an empty message": 1}
    assert manifest.skipped == (skipped if kind == "jsonl" else dict.fromkeys(skipped, 1))
    assert manifest == read_corpus_manifest(out) and manifest.loss_mask
    store, again = open_built_corpus(out), load_tokenizer(str(out))
    assert again.fingerprint == tokenizer.fingerprint and again.chat.encode_prompt(TWO_TURNS[:1])
    lengths, texts = store.documents["length"].tolist(), []
    for start, length, skip in zip(
        np.cumsum([0, *lengths])[:-1].tolist(), lengths, store.documents["skip"], strict=True
    ):
        tokens, targets = store.read(start, length).tolist(), store.read_targets(start, length)
        assert targets[skip] and not (kind == "parquet" and targets[:skip].any())
        texts.append(counted_texts(tokenizer, tokens, targets & (np.arange(length) >= skip)))
    hello, answer, plain = ["Hello!<|im_end|>"], [" 4<|endoftext|>"], ["Plain text<|endoftext|>"]
    assert texts == ([COUNTED["chatml"], hello, answer, plain] if kind == "jsonl" else [COUNTED["chatml"]])
    for start in range(sum(lengths) - 7):  # any part of a mask
        assert (store.read_targets(start, 7) == store.read_targets(0, start + 7)[start:]).all()


def load(source: Path, tmp_path: Path, **values: Any) -> BatchLoader:
    given = settings(tmp_path, source=str(source), validation_fraction=0, test_fraction=0, batch_sequences=1, **values)
    return BatchLoader(prepare_data(given), given, seed=3)


def test_batches_count_the_assistant_alone(tmp_path: Path) -> None:
    folder = write_chat_tokenizer(tmp_path / "tokenizer", "llama3")
    path = write_records(tmp_path / "chats.jsonl", [chat(TWO_TURNS), chat(TWO_TURNS[2:]), chat(TWO_TURNS)])
    loader = load(path, tmp_path, tokenizer=str(folder), sequence_length=300)
    batch = loader.batch(0, range(1))
    texts = counted_texts(loader.tokenizer, batch.targets[0].tolist(), batch.weights[0])
    assert texts == [*COUNTED["llama3"], COUNTED["llama3"][1], *COUNTED["llama3"]]
    assert batch.documents is not None and loader.samples.remarks == []


def test_conversations_that_are_too_long(tmp_path: Path) -> None:
    folder = write_chat_tokenizer(tmp_path / "tokenizer", "llama3")
    long_prompt = [{"role": "user", "content": "Hello " * 200}, TWO_TURNS[1]]
    path = write_records(tmp_path / "chats.jsonl", [chat(long_prompt), chat(TWO_TURNS), chat(TWO_TURNS[2:])])
    loader = load(path, tmp_path, tokenizer=str(folder), sequence_length=60)
    every = [loader.batch(step, range(1)) for step in range(loader.train_samples)]
    assert len(every) == 2 and all(batch.weights.any() for batch in every)
    [remark] = loader.samples.remarks
    assert (
        "2 of 3 records" in remark and "longer than data.sequence_length = 60 and lose their end; 1 of them" in remark
    )
    for length in (5, 20):
        message = (
            rf"data.sequence_length = {length} ends before the first answer of each record of .*first answer starts at"
        )
        refused(message, load, path, tmp_path, tokenizer=str(folder), sequence_length=length)


def test_a_template_that_changes_builds_again(tmp_path: Path) -> None:
    path = write_records(tmp_path / "chats.jsonl", [chat(TWO_TURNS)] * 2)
    one, two = (write_chat_tokenizer(tmp_path / style, style) for style in ("chatml", "chatml-marked"))
    prints = {load(path, tmp_path, tokenizer=str(folder), sequence_length=99).fingerprint for folder in (one, two)}
    assert len(prints) == 2
    (one / "chat_template.jinja").write_text(STYLES["plain"][0])
    assert load_tokenizer(str(one)).chat.encode_prompt(TWO_TURNS[:1])[:1] == load_tokenizer(str(one)).encode("user")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            chat([{"role": "asistant", "content": "x"}]),
            r"chats.jsonl:2: field 'messages' has the message 1 with the role",
        ),
        (chat([{"content": "x"}]), "message 1 with no role; known are system"),
        (chat([*TWO_TURNS, {"role": "user"}]), "message 5 of the role 'user' with no content"),
        (chat([{"role": "user", "content": 5}]), "content 5, which is not a text; correct or remove this record"),
        (chat([{"role": "user", "content": [{"type": "image"}]}]), "which is not a text"),
        ({"messages": "hello"}, "field 'messages' is \"hello\", not a list of messages"),
        (chat(["hello"]), 'message 1 "hello", not an object with role and content'),  # type: ignore[list-item]  # a mistake
        ({**chat(TWO_TURNS), "tools": "{"}, "tools that are not JSON"),
        ({**chat(TWO_TURNS), "tools": [1]}, "not a list of JSON schemas"),
        (chat([{"role": "system", "content": "x"}, *TWO_TURNS]), "refuses the conversation: System role not supported"),
        (chat(TWO_TURNS[1:]), r"chats.jsonl:2: the chat template of .* refuses the conversation: Conversation roles"),
    ],
)
def test_records_that_are_refused(record: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write_chat_tokenizer(tmp_path / "tokenizer", "gemma")
    path = write_records(tmp_path / "chats.jsonl", [chat(TWO_TURNS), record])
    refused(message, load, path, tmp_path, tokenizer=str(folder))


def test_a_template_that_rewrites_earlier_turns(tmp_path: Path) -> None:
    """Such as that of Qwen 3, which takes the thoughts out of earlier answers."""
    template = STYLES["chatml"][0].replace(
        "(m.content or '')", "('' if loop.last or m.role == 'user' else '!') + (m.content or '')"
    )
    folder = write_chat_tokenizer(tmp_path / "tokenizer", "chatml", chat_template=template)
    tokenizer = load_tokenizer(str(folder))
    refused(
        "renders message 2 differently when other messages follow.*mark it with {% generation %}",
        tokenizer.chat.encode,
        [Conversation(TWO_TURNS, None, "x")],
    )
    assert tokenizer.chat.encode([Conversation(TWO_TURNS[:2], None, "x")])


def test_an_answer_that_ends_with_several_tokens_of_a_character(tmp_path: Path) -> None:
    turns = "{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}"
    template = turns + "{{ 'assistant: ' if add_generation_prompt }}"
    folder = write_chat_tokenizer(tmp_path, "plain", chat_template=template)
    tokenizer = load_tokenizer(str(folder))
    [encoded] = tokenizer.chat.encode([parse_conversation(TWO_TURNS, None, "x")])
    texts = counted_texts(tokenizer, encoded.tokens, encoded.is_target)
    assert texts[-1] == " It is four \U0001f600" and encoded.is_target[-4:].all()


def test_tokenizers_without_a_template(tmp_path: Path) -> None:
    path = write_records(tmp_path / "chats.jsonl", [chat(TWO_TURNS)])
    refused("data.tokenizer = 'bytes' has no chat template, which conversations need", load, path, tmp_path)
    trained = r"'bpe:300' is trained on text and has no chat template, but .*chats.jsonl:1 is a conversation"
    refused(trained, load, path, tmp_path, tokenizer="bpe:300")
    folder = write_chat_tokenizer(tmp_path / "tokenizer", "llama3", chat_template=None)
    refused("has no chat template, which conversations need", load, path, tmp_path, tokenizer=str(folder))
    only = write_records(tmp_path / "only.jsonl", [chat(TWO_TURNS[:1])])
    folder = write_chat_tokenizer(tmp_path / "tokenizer", "llama3")
    message = r"is empty: it holds only 1 record \(1 without a turn of the assistant\)"
    refused(message, load, only, tmp_path, tokenizer=str(folder))
