"""Builds everything that a run on one rank consists of, from its job."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from motet.collectives.execute.api import broadcast
from motet.core.batch import Batch
from motet.core.errors import InputError, check_input
from motet.core.seeds import derive_seed
from motet.data.corpus.prepare import prepare_data
from motet.data.samples.loader import BatchLoader
from motet.models.build import TrainableModel, build_trainable_model
from motet.models.generation import generate_tokens
from motet.models.settings import ModelSettings, UserModuleSettings
from motet.models.user_module import DataRequirements
from motet.parallel.layout import Layout
from motet.parallel.model_sharding import ModelSharding
from motet.parallel.process.process_group import (
    RankGroup,
    all_ranks,
    broadcast_buffers,
    check_same_on_all_ranks,
    first_difference,
    module_attributes,
    module_signature,
    refuse_together,
)
from motet.precision.numerics import precision_numerics
from motet.train.balance.balanced_layers import BalancedLayer, balance_of_model, find_balanced_layers, register_loads
from motet.train.balance.expert_balance import ExpertBalance
from motet.train.engine import TrainingEngine, build_engine
from motet.train.evaluation import (
    EvaluationBatchSource,
    EvaluationResult,
    ForwardFunction,
    compute_here,
    evaluate,
)
from motet.train.job import Job
from motet.train.launch.preflight import check_huggingface_model
from motet.train.numerics_monitor.monitor import NumericsMonitor
from motet.train.proof.proposed_sharding import agreed_sharding, sharding_of_model
from motet.train.replica_check.checker import ReplicaChecker
from motet.train.state import TrainingState
from motet.train.step import MicroBatchLoop, TrainStep


@dataclass(frozen=True)
class TrainingComponents:
    """Everything that a run on one rank consists of."""

    group: RankGroup
    layout: Layout
    data: BatchLoader
    model: TrainableModel
    engine: TrainingEngine
    state: TrainingState
    total_steps: int
    ranks: int  # Ranks that compute: those of the group, or the workers of a parameter server

    def make_runner(self, job: Job) -> MicroBatchLoop:
        return MicroBatchLoop(self.model, self.data, self.engine, self.layout, job.data.batch_sequences)

    def make_train_step(self, job: Job) -> TrainStep:
        every_steps = job.monitor.replica_check_every
        checker = ReplicaChecker(self.model, self.data, self.engine, every_steps) if every_steps else None
        every_steps = job.monitor.numerics_every
        numerics = NumericsMonitor(self.engine, job.precision.resolved, every_steps) if every_steps else None
        return TrainStep(self.engine, self.make_runner(job), checker, numerics)

    def evaluate(self, job: Job, split: str, data: EvaluationBatchSource | None = None) -> EvaluationResult | None:
        """Evaluate on a split of the run's data or of `data`; None when the job holds nothing out for it."""
        if not self.data.evaluation_batches(split):
            return None
        broadcast_buffers(self.model.module, self.engine.module_part_group)
        pipeline = self.engine.pipeline
        with self.engine.consensus_parameters():
            return evaluate(
                self.model,
                data or self.data,
                split,
                max_batches=job.monitor.evaluate_batches,
                group=self.group,
                layout=self.layout,
                batch_sequences=job.data.batch_sequences,
                forward=partial(self._forward_of_part, pipeline.forward if pipeline else compute_here),
            )

    def _forward_of_part(self, forward: ForwardFunction, compute: Callable[[], Tensor], batch: Batch) -> Tensor | None:
        with self.engine.attention_of(batch):
            return forward(compute, batch)

    def generate(
        self,
        prompt: list[int],
        count: int,
        *,
        seed: int,
        temperature: float = 1.0,
        on_scores: Callable[[Tensor], object] | None = None,
    ) -> list[int]:
        """Let the model continue a prompt, on all ranks together."""
        model, pipeline = self.model, self.engine.pipeline
        if pipeline is not None:
            logits = model.logits
            forward = pipeline.forward_on_all
            model = replace(model, logits=lambda batch: forward(partial(logits, batch), batch), next_logits=None)
        with self.engine.consensus_parameters():
            return generate_tokens(model, prompt, count, seed=seed, temperature=temperature, on_scores=on_scores)


def precision_context(job: Job, device: torch.device | None = None) -> AbstractContextManager[None]:
    """A context that computes in the precision of the job's recipe; on a CPU by default."""
    return precision_numerics(job.precision, device or torch.device("cpu"))


def build_model(job: Job, device: torch.device, group: RankGroup | None = None) -> tuple[BatchLoader, TrainableModel]:
    """Data, and the model. On the ranks of a group, parameters may be on the meta device, and get values later."""
    prepared, dtype = prepare_data(job.data), getattr(torch, job.precision.resolved.master)
    data = BatchLoader(prepared, job.data, job.run.seed, job.run.epochs)
    requirements = DataRequirements(prepared.vocab_size, prepared.classes if job.data.objective == "classify" else None)
    build = partial(build_trainable_model, job.model, job.run.seed, dtype, device, requirements)
    model = _build_on_ranks(job.model, build, group) if group else build()
    if model.objective is not None:
        check_huggingface_model(job, prepared, model)
    return data, model


def _build_on_ranks(settings: ModelSettings, build: Callable[..., TrainableModel], group: RankGroup) -> TrainableModel:
    """The model of a rank, without memory for parameters. Where only a complete module has their values, the first
    rank builds one, as does a rank whose module differs on the meta device."""
    is_first, has_factory = group.rank == 0, isinstance(settings, UserModuleSettings) and settings.hf_path is None
    model = _build_together(build if has_factory and is_first else partial(_try_on_meta, build), group)
    values = model.initial_values if model else None
    if all_ranks(values is not None, group) and model and values:
        check_same_on_all_ranks([*module_signature(model.module), f"weights {values.fingerprint}"], group)
        return model
    remark, is_built = model.remark if model else None, model is not None and (has_factory or not is_first)
    if values:
        remark = "rank 0 loads all weights before ranks keep their parts: another rank cannot read slices of its files"
    model = _build_together((lambda: model) if is_built else build, group)
    assert model is not None
    attributes = module_attributes(model.module) if has_factory else ()  # transformers marks what it has loaded
    if first_difference([*module_signature(model.module), *attributes], group):
        model = None
    model = _build_together((lambda: model) if model else build, group)
    assert model is not None
    check_same_on_all_ranks(module_signature(model.module), group)
    broadcast_buffers(model.module, group, only_persistent=False)
    if not all_ranks(is_first or all(p.is_meta for p in model.module.parameters()), group):
        remark = (
            "every rank builds the complete module before it keeps its part: without values of parameters, "
            "model.factory makes another module, or none"
        )
    return replace(model, initial_values=None, remark=remark if group.world > 1 else None)


def _build_together(build: Callable[[], TrainableModel | None], group: RankGroup) -> TrainableModel | None:
    problem, model = "", None
    try:
        model = build()
    except InputError as error:
        problem = str(error)
    refuse_together(problem, group)
    return model


def _try_on_meta(build: Callable[..., TrainableModel]) -> TrainableModel | None:
    try:
        return build(on_meta=True)
    except InputError:
        raise
    except Exception:  # noqa: BLE001  # a factory may raise anything on the meta device, and work with values
        return None


def build_components(
    job: Job, group: RankGroup, folder: Path, *, model_sharding: ModelSharding | None = None
) -> TrainingComponents:
    """Data, model and optimizer at step 0, the same for every layout; by default the split of the model is proposed."""
    layout = job.layout_for(group.world)
    data, model = build_model(job, group.device, group)
    _check_same_data(data, group)
    propose = partial(sharding_of_model, job, data=data, layout=layout)
    model_sharding = agreed_sharding(model, propose, model_sharding, group=group, dims=layout.dims)
    model, engine = build_job_engine(job, model, group, layout=layout, model_sharding=model_sharding)
    folder.mkdir(parents=True, exist_ok=True)
    state = engine.training_state(folder / "checkpoints", job.checkpoint, data.fingerprint)
    steps = job.run.steps if job.run.steps is not None else data.steps_for_epochs(job.run.epochs or 1.0)
    return TrainingComponents(group, layout, data, model, engine, state, steps, group.world)


def build_job_engine(
    job: Job, model: TrainableModel, group: RankGroup, *, layout: Layout, model_sharding: ModelSharding
) -> tuple[TrainableModel, TrainingEngine]:
    """The model as this rank computes it, and its engine."""
    layers = _balanced_on_ranks(job, model, group)
    register_loads(model.module, layers)
    engine = build_engine(
        model.module,
        group,
        layout=layout,
        settings=job,
        batch_sequences=job.data.batch_sequences,
        model_sharding=model_sharding,
        values=model.initial_values,
    )
    balance = balance_of_model(job.model)
    if balance is not None:
        engine.balance = ExpertBalance(
            model.module,
            layers,
            balance,
            group=engine.step_group,
            dims=layout.dims,
            context=layout.context,
            reproducible_rows=layout.sharding.reproducible_batch_size,
        )
    engine.optimizer.rounding_seed = job.run.seed
    if scaler := engine.optimizer.loss_scaler:  # Assumed targets, until the first step counts them
        row_targets = 1 if job.data.objective == "classify" else job.data.sequence_length
        engine.optimizer.loss_scaler = scaler.with_targets(job.data.batch_sequences * row_targets)
    if engine.pipeline is None:
        wrap = engine.optimizer.sharded_parameters.wrap_as_forward
        if model.check_on_tokens and group.device.type != "meta":
            with torch.no_grad():
                wrap(model.check_on_tokens)()
        # Ranks that split the tokens of a row cannot share one token.
        is_split = model_sharding.boundary_comms or model_sharding.activations
        next_logits = None if is_split or model.next_logits is None else wrap(model.next_logits)
        model = replace(model, loss_sum=wrap(model.loss_sum), logits=wrap(model.logits), next_logits=next_logits)
    return replace(model, initial_values=None), engine


def _balanced_on_ranks(job: Job, model: TrainableModel, group: RankGroup) -> tuple[BalancedLayer, ...]:
    """The layers whose experts are balanced; a model that cannot be balanced is refused on all ranks."""
    problem, layers = "", tuple[BalancedLayer, ...]()
    try:
        layers = find_balanced_layers(job, model.module)
    except InputError as error:
        problem = str(error)
    refuse_together(problem, group)
    return layers


def _check_same_data(data: BatchLoader, group: RankGroup) -> None:
    first_rank_seed = torch.tensor([local_seed := derive_seed(data.fingerprint)], device=group.device)
    broadcast(first_rank_seed, group)
    check_input(
        first_rank_seed.item() == local_seed,
        f"the data of rank {group.rank} (fingerprint {data.fingerprint}) is not that of rank 0; give every machine "
        "the same files, or a folder made by `motet data build` (`stdlib` differs between Python versions)",
    )
