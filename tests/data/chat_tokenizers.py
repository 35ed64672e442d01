"""Tokenizers of Hugging Face with chat templates in the style of known models, written here."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CHATML = """{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') -}}
{%- for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function.name + '</tool_call>' }}{% endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"""
CHATML_MARKED = """{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' -}}{%- generation -%}{{- m.content + '<|im_end|>' -}}{%- endgeneration -%}{{- '\\n' -}}
{%- else -%}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"""
LLAMA3 = """{{- bos_token -}}
{%- if tools %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nTools: ' + (tools | tojson) + '<|eot_id|>' }}
{%- endif -%}
{%- for m in messages -%}
{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif -%}"""
GEMMA = """{{ bos_token -}}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif -%}
{%- for m in messages -%}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif -%}
{%- set role = 'model' if m['role'] == 'assistant' else m['role'] -%}
{{- '<start_of_turn>' + role + '\\n' + m['content'] | trim + '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif -%}"""
MISTRAL = """{{- bos_token -}}
{%- for m in messages -%}
{%- if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}
{%- elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}{% endif -%}
{%- endfor -%}"""
PLAIN = """{%- for m in messages -%}{{ m.role + ': ' + m.content + '\\n' }}{%- endfor -%}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif -%}"""

# Name -> template, special tokens, and the kind of the tokenizer.
STYLES: dict[str, tuple[str, list[str], str]] = {
    "chatml": (CHATML, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "bytes"),
    "chatml-marked": (CHATML_MARKED, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "bytes"),
    "llama3": (
        LLAMA3,
        ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "bytes",
    ),
    "gemma": (GEMMA, ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], "pieces"),
    "mistral": (MISTRAL, ["<s>", "</s>", "[INST]", "[/INST]"], "pieces"),
    "plain": (PLAIN, ["</s>"], "trimmed"),
}
_BOS = {"<|begin_of_text|>": "<|end_of_text|>", "<bos>": "<eos>", "<s>": "</s>"}
_TEXTS = ["Hello there, how are you today?\n\nFine, thanks.", "user assistant system model: What is 2 + 2? It is four."]


def write_chat_tokenizer(folder: Path, style: str, **config: Any) -> Path:
    template, special, kind = STYLES[style]
    backend = Tokenizer(models.BPE(byte_fallback=True))
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    if kind == "pieces":
        backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        backend.normalizer = normalizers.Replace(" ", "\u2581")
        backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
        names = [*special, "<unk>", *(f"<0x{i:02X}>" for i in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=450, special_tokens=names, show_progress=False)
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=kind == "trimmed")
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=400, special_tokens=special, initial_alphabet=sorted(alphabet), show_progress=False
        )
    backend.train_from_iterator(_TEXTS * 3, trainer=trainer)
    if kind == "trimmed":
        from tokenizers import processors

        backend.post_processor = processors.ByteLevel(trim_offsets=True)
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    if kind == "pieces":  # Only the special tokens of the model are special; bytes are ordinary tokens
        tree = json.loads((folder / "tokenizer.json").read_text())
        tree["added_tokens"] = [token for token in tree["added_tokens"] if token["content"] in [*special, "<unk>"]]
        (folder / "tokenizer.json").write_text(json.dumps(tree))
    ends = _BOS.get(special[0], special[0])
    values = {"eos_token": ends, "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, **config}
    values |= {"bos_token": special[0]} if special[0] in _BOS else {}
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    return folder
