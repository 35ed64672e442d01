"""The `[model]` section: one of three architectures by its settings, or any module of the user."""

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from motet.core.config_loading import FilePathText, FrozenSettings
from motet.core.errors import InputError, check_input, names_matching

NormKind = Literal["rms", "layer"]
MAX_LAYERS = 1024  # A plan has values for each layer
ActivationName = Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared"]


class AdapterSettings(FrozenSettings):
    """Low-rank adapters: W x + (alpha / rank) B A x, where only A and B are trained."""

    rank: Annotated[int, Field(ge=1)] = 8
    alpha: Annotated[float, Field(gt=0)] = 16.0
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = ("*",)
    """Shell patterns of the names of linear modules that get an adapter."""
    weights: FilePathText | None = None
    """A folder of PEFT with the initial values of A and B; from the seed when not given."""

    def adapted_layers(self, layers: Iterable[str]) -> list[str]:
        """The linear layers of a model that get an adapter."""
        return names_matching(self.targets, layers, "model.adapters.targets: {!r} matches no linear layer")


class TrainableParameterSettings(FrozenSettings):
    """The trained parameters, common to every kind of model."""

    frozen: tuple[str, ...] = ()
    """Shell patterns of parameter names that are not trained."""
    adapters: AdapterSettings | None = None
    """Low-rank adapters; everything else is frozen."""

    def without_stored_values(self) -> Self:
        """The same model with initial values from the seed, for a copy of other sizes."""
        update: dict[str, Any] = {"weights": None} if getattr(self, "weights", None) else {}
        if self.adapters and self.adapters.weights:
            update["adapters"] = self.adapters.model_copy(update={"weights": None})
        return self.model_copy(update=update)

    @property
    def trains_all(self) -> bool:
        return not self.frozen and self.adapters is None

    def check_trained(self, is_trained: bool, model: str) -> None:
        """Refuse a model without any parameter that is trained."""
        check_input(
            is_trained,
            f"nothing is left to train: model.frozen = {list(self.frozen)} covers every parameter; leave some out"
            if self.frozen
            else f"nothing to train: {model} has no trainable parameter; give it some",
        )


def frozen_parameters(patterns: Iterable[str], parameters: Iterable[str]) -> list[str]:
    """The parameters that a pattern of `model.frozen` names."""
    return names_matching(patterns, parameters, "model.frozen: {!r} matches no parameter")


class RopeScalingSettings(FrozenSettings):
    """Llama 3.1's stretching of rotary wavelengths beyond the context that the model was first trained on."""

    factor: Annotated[float, Field(ge=1)] = 8.0
    low_frequency_factor: Annotated[float, Field(gt=0)] = 1.0
    high_frequency_factor: Annotated[float, Field(gt=0)] = 4.0
    original_context: Annotated[int, Field(ge=1)] = 8192


class MixtureOfExpertsSettings(FrozenSettings):
    """Mixture of experts in place of the feed-forward network: each token visits a few of the experts."""

    count: Annotated[int, Field(ge=2)]
    per_token: Annotated[int, Field(ge=1)]
    hidden: Annotated[int, Field(ge=1)]
    """The inner width of an expert."""
    shared: Annotated[int, Field(ge=0)] = 0
    """Experts that all tokens visit; they are one wider feed-forward network."""
    first_dense_layers: Annotated[int, Field(ge=0)] = 0
    """The first layers keep a plain feed-forward network."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """The function that makes the scores of a token from its logits; the experts with the highest scores are chosen."""
    normalize_weights: bool = True
    """Divide the scores of the chosen experts of a token by their sum; these are the weights of their outputs."""
    weight_scale: Annotated[float, Field(gt=0)] = 1.0
    """A factor of all weights."""
    groups: Annotated[int, Field(ge=1)] = 1
    """Groups of neighbouring experts: a token visits experts of a few groups, those with the highest sums of their two
    best scores."""
    groups_per_token: Annotated[int, Field(ge=1)] | None = None
    """Groups whose experts a token may visit; all of them when not given."""
    capacity: Annotated[float, Field(gt=0)] | None = None
    """In training, an expert takes at most this factor times its even share of the assignments of each row; no limit
    when not given."""
    drop: Literal["last", "lowest"] | None = None
    """The assignments beyond the capacity that are dropped: those of the last tokens of the row, or those with the
    lowest weights."""

    @model_validator(mode="after")
    def _enough_experts(self) -> "MixtureOfExpertsSettings":
        if self.per_token > self.count:
            raise ValueError(
                f"model.experts.per_token = {self.per_token} is more than model.experts.count = {self.count}"
            )
        return self

    @model_validator(mode="after")
    def _groups_fit(self) -> "MixtureOfExpertsSettings":
        groups, chosen, size = self.groups, self.groups_per_token, self.count // self.groups
        if self.count % groups or (groups > 1 and size < 2):
            raise ValueError(
                f"model.experts.groups = {groups} does not divide model.experts.count = {self.count} into groups of at "
                "least two experts; choose a divisor"
            )
        if chosen is not None and chosen > groups:
            raise ValueError(f"model.experts.groups_per_token = {chosen} is more than model.experts.groups = {groups}")
        if chosen is not None and self.per_token > chosen * size:
            raise ValueError(
                f"model.experts.per_token = {self.per_token} is more than the {chosen * size} experts that "
                f"model.experts.groups_per_token = {chosen} groups of {size} leave; choose more groups"
            )
        return self

    @model_validator(mode="after")
    def _drop_needs_capacity(self) -> "MixtureOfExpertsSettings":
        if self.capacity is not None and self.drop is None:
            raise ValueError(
                f"model.experts.capacity = {self.capacity} drops assignments; set model.experts.drop to 'last' "
                "(tokens of the row) or 'lowest' (weights)"
            )
        if self.drop is not None and self.capacity is None:
            raise ValueError(f"model.experts.drop = {self.drop!r} needs model.experts.capacity, a factor such as 1.25")
        return self


class BalanceSettings(FrozenSettings):
    """Even loads of the experts of a mixture. No number of it depends on ranks or micro-batches."""

    kind: Literal["none", "row", "bias"] = "none"
    """`row`: a term of the loss for each row. `bias`: a correction of each expert's score that counts for the choice
    alone, and moves after each step."""
    weight: Annotated[float, Field(ge=0)] | None = None
    """The factor of the term of each row; when not given, 0.01 with `row` and 0 otherwise."""
    speed: Annotated[float, Field(gt=0)] = 0.001
    """The change of a correction in one step, with `bias`."""
    z_weight: Annotated[float, Field(ge=0)] = 0.0
    """The factor of the mean square of the log of the sum of exponentials of a token's logits."""

    @property
    def row_weight(self) -> float:
        """The factor of the term of each row."""
        default = 0.01 if self.kind == "row" else 0.0
        return default if self.weight is None else self.weight

    @property
    def is_needed(self) -> bool:
        """Whether it changes the training of a mixture of experts."""
        return self.kind != "none" or self.row_weight > 0 or self.z_weight > 0


class LatentAttentionSettings(FrozenSettings):
    """DeepSeek's multi-head latent attention: keys and values come from one short vector of each token."""

    query_rank: Annotated[int, Field(ge=1)] | None = None
    """The length of the vector from which queries come; they come from the hidden state when not given."""
    key_value_rank: Annotated[int, Field(ge=1)]
    rotary_head_dim: Annotated[int, Field(ge=2, multiple_of=2)]
    """Components of each query head and of the key that all heads share, which are rotated."""
    plain_head_dim: Annotated[int, Field(ge=1)]
    value_head_dim: Annotated[int, Field(ge=1)]


class TransformerSettings(TrainableParameterSettings):
    """Settings that motet's three architectures share."""

    other_names: ClassVar = {
        "context": "max_position_embeddings max_seq_len n_positions",
        "layers": "n_layer* num*layers depth",
        "hidden": "hidden_size d_model n_embd dim",
        "heads": "n_head* num*heads",
        "ffn_hidden": "intermediate_size *ffn*size *ffn_dim d_ff n_inner",
    }
    vocab_size: Annotated[int, Field(ge=2, le=2**31)]
    context: Annotated[int, Field(ge=1)]
    """The longest sequence, which is also the size of a table of learned positions."""
    layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)]
    hidden: Annotated[int, Field(ge=1)]
    heads: Annotated[int, Field(ge=1)]
    head_dim: Annotated[int, Field(ge=1)] | None = None
    """hidden / heads when not given."""
    ffn_hidden: Annotated[int, Field(ge=1)]
    activation: ActivationName = "silu"
    gated: bool = True
    """act(gate x) * (up x) instead of act(up x)."""
    norm: NormKind = "rms"
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    init_std: Annotated[float, Field(gt=0)] = 0.02

    @property
    def dim_per_head(self) -> int:
        return self.head_dim or self.hidden // self.heads

    @model_validator(mode="after")
    def _heads_divide_hidden(self) -> "TransformerSettings":
        if self.head_dim is None and self.hidden % self.heads:
            raise ValueError(
                f"model.hidden = {self.hidden} is not a multiple of model.heads = {self.heads}; change one, "
                "or give model.head_dim"
            )
        return self


class DecoderSettings(TransformerSettings):
    """A causal decoder: GPT-2 and 3, Llama 2 and 3, Qwen 2 and 3, Mistral, Nemotron by their settings."""

    family: Literal["decoder"] = "decoder"
    kv_heads: Annotated[int, Field(ge=1)] | None = None
    """Grouped-query attention; `heads` when not given."""
    positions: Literal["rotary", "learned", "none"] = "rotary"
    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    rotary_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The part of each head that is rotated."""
    rope_scaling: RopeScalingSettings | None = None
    qkv_bias: bool = False
    """Biases of queries, keys and values, also without `bias`."""
    bias: bool = False
    """Biases in all linear layers of a block and in layer norms."""
    ffn_bias: bool | None = None
    """Biases in the feed-forward network; `bias` when not given."""
    norm_bias: bool | None = None
    """Biases in layer norms; `bias` when not given. RMS norms never have one."""
    query_key_norm: bool = False
    """Qwen 3's norm of each query and key head."""
    sliding_window: Annotated[int, Field(ge=1)] | None = None
    tied: bool = True
    """The output head is the embedding table."""
    weights: FilePathText | None = None
    """A folder of Hugging Face with the initial values (Llama, Qwen 2 and 3, Mistral, GPT-2); from the seed when not
    given."""
    experts: MixtureOfExpertsSettings | None = None
    balance: BalanceSettings = BalanceSettings()
    latent_attention: LatentAttentionSettings | None = None

    @property
    def has_ffn_bias(self) -> bool:
        return self.bias if self.ffn_bias is None else self.ffn_bias

    @property
    def has_norm_bias(self) -> bool:
        return self.norm == "layer" and (self.bias if self.norm_bias is None else self.norm_bias)

    def experts_of(self, layer: int) -> MixtureOfExpertsSettings | None:
        """The experts of a layer; None where it has a plain feed-forward network."""
        return self.experts if self.experts and layer >= self.experts.first_dense_layers else None

    @model_validator(mode="after")
    def _heads_share_keys_evenly(self) -> "DecoderSettings":
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(
                f"model.heads = {self.heads} is not a multiple of model.kv_heads = {self.kv_heads}: each key head "
                "serves the same number of query heads"
            )
        return self

    @model_validator(mode="after")
    def _balances_experts(self) -> "DecoderSettings":
        if self.experts is None and self.balance.is_needed:
            raise ValueError("model.balance balances the load of experts; give [model.experts], or leave it out")
        if self.experts is not None and self.balance.is_needed and not self.has_routed_layers:
            raise ValueError(
                f"model.experts.first_dense_layers = {self.experts.first_dense_layers} leaves none of model.layers = "
                f"{self.layers} with experts for model.balance; choose fewer, or leave model.balance out"
            )
        return self

    @property
    def has_routed_layers(self) -> bool:
        """Whether some layers have experts."""
        return self.experts is not None and self.experts.first_dense_layers < self.layers


class EncoderSettings(TransformerSettings):
    """BERT: a bidirectional encoder with a masked-token head or a classification head."""

    family: Literal["encoder"] = "encoder"
    activation: ActivationName = "gelu"
    gated: bool = False
    norm: NormKind = "layer"
    norm_eps: Annotated[float, Field(gt=0)] = 1e-12
    head: Literal["masked", "classify"] = "masked"
    classes: Annotated[int, Field(ge=2)] = 2
    token_types: Annotated[int, Field(ge=0)] = 2


class EncoderDecoderSettings(TransformerSettings):
    """T5: relative positions, RMS norms without biases, a decoder that attends to the encoder."""

    family: Literal["encoder-decoder"] = "encoder-decoder"
    decoder_layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)] | None = None
    """`layers` when not given."""
    activation: ActivationName = "gelu_tanh"
    norm_eps: Annotated[float, Field(gt=0)] = 1e-6
    relative_buckets: Annotated[int, Field(ge=2)] = 32
    relative_distance: Annotated[int, Field(ge=2)] = 128
    tied: bool = True


class UserModuleSettings(TrainableParameterSettings):
    """Any module: `factory` names a function of yours, or `hf:` and a folder or config.json of Hugging Face."""

    family: Literal["module"] = "module"
    other_names: ClassVar = {"factory": "path model_name* name_or_path pretrained* hf*"}
    factory: str
    """`package.module:function`, which returns an nn.Module, or `hf:FOLDER` / `hf:PATH/config.json`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function; for `hf:`, values that replace those of config.json."""
    vocab_size: Annotated[int, Field(ge=2, le=2**31)] | None = None
    """Checked against the tokenizer when given; `hf:` models know theirs."""
    balance: BalanceSettings | None = None
    """The balance of the experts of a mixture; nothing is counted when not given."""

    @property
    def hf_path(self) -> str | None:
        """The folder or config.json of an `hf:` factory."""
        return self.factory.removeprefix("hf:") if self.factory.startswith("hf:") else None

    def check_layers_are_known(self) -> None:
        """Refuse settings that name layers of the module, since its config names none."""
        check_input(
            self.trains_all,
            "model.adapters and model.frozen name layers of the module, and its config tells none; "
            "`motet show model JOB --trace` finds its sizes",
        )


ModelSettings = Annotated[
    DecoderSettings | EncoderSettings | EncoderDecoderSettings | UserModuleSettings, Field(discriminator="family")
]


def check_can_be_trained(settings: ModelSettings) -> None:
    """Raise for a model that can be planned alone."""
    if not isinstance(settings, DecoderSettings) or settings.latent_attention is None:
        return
    replaced = {
        "positions": settings.positions != "rotary",
        "kv_heads": settings.kv_heads not in (None, settings.heads),
        "query_key_norm": settings.query_key_norm,
        "rotary_fraction": settings.rotary_fraction != 1,
    }
    for name in (name for name, is_set in replaced.items() if is_set):
        raise InputError(
            f"model.{name} = {getattr(settings, name)!r} does not fit model.latent_attention, whose heads have a "
            "rotated part, share one rotated key and have no norms; leave it out"
        )
