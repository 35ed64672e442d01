"""The `[data]` section: text sources, tokenizer, and the samples of a step."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from motet.core.config_loading import FilePathText, FrozenSettings

NUM_SENTINELS = 100  # Reserved by motet's own tokenizers for the objective `spans`
Objective = Literal["causal", "masked", "spans", "classify"]


class DataSourceSettings(FrozenSettings):
    """One corpus, and its weight in the mixture."""

    source: FilePathText
    """`stdlib`; `synthetic:RULE`; a file, folder or pattern of .txt .md .py .jsonl .parquet; a folder made by
    `motet data build`; a Megatron `.bin` prefix; `hf:NAME`."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    text_field: str = "text"
    prompt_field: str = "prompt"
    answer_field: str = "answer"
    """A record with both of these is fine-tuning data: only the answer is a target."""
    messages_field: str = "messages"
    """A record with this field, or with `conversations`, is a conversation: only the assistant's turns are targets."""
    label_field: str = "label"
    """The class of a record, a whole number from 0; read only for the objective `classify`."""


class DataSettings(FrozenSettings):
    """Data that the model is trained on."""

    other_names: ClassVar = {
        "source": "data_path dataset* train_data* *train_file",
        "tokenizer": "tokenizer_* vocab_file",
        "sequence_length": "seq_* *seq_len* *seq_length block_size context_length n_ctx",
        "batch_sequences": "*batch_size*",
    }
    source: FilePathText = "stdlib"
    """Shorthand for a mixture of one; see `data.mixture.source`."""
    mixture: tuple[DataSourceSettings, ...] = ()
    """Several corpora with weights, instead of `source`."""
    tokenizer: FilePathText = "bpe:4096"
    """`bpe:SIZE` trains a byte-level BPE on the corpus; `bytes`; or the path of a tokenizer.json or its folder."""
    objective: Objective = "causal"
    sequence_length: Annotated[int, Field(ge=1)] = 256
    batch_sequences: Annotated[int, Field(ge=1, le=1 << 24)] = 16
    """Sequences in one step, over all ranks and micro-batches."""
    restart_documents: bool = True
    """Attention and positions do not reach across the border of two documents that share a sequence."""
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.01
    test_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.01
    mask_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """`masked` and `spans`: the fraction of tokens to predict."""
    samples: Annotated[int, Field(ge=1)] | None = None
    """Train on at most this many samples of each corpus; `synthetic:` sources make this many (default 10,000)."""
    prefetch: Annotated[int, Field(ge=0, le=1024)] = 2
    """Micro-batches that a thread of each rank reads before the step asks for them; 0 reads in the training thread."""
    workers: Annotated[int, Field(ge=1)] | None = None
    """Processes that tokenise; all cores when not given."""
    cache: FilePathText | None = None
    """The folder of built corpora; `~/.cache/motet` when not given."""

    @model_validator(mode="after")
    def _check_training_fraction(self) -> Self:
        if self.validation_fraction + self.test_fraction >= 1:
            raise ValueError(
                f"data.validation_fraction = {self.validation_fraction} and data.test_fraction = {self.test_fraction} "
                "leave nothing to train on; lower their sum below 1"
            )
        return self

    def sources(self) -> tuple[DataSourceSettings, ...]:
        """The mixture, with one corpus if only `source` is set."""
        return self.mixture or (DataSourceSettings(source=self.source),)
