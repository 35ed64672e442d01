"""The same fine-tuning in `Trainer` and in motet: equal losses, and equal adapters at the end."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from export.stored_models import TEXT
from models.tiny_configs import TINY_CONFIGS
from motet.checkpoint.reader import open_checkpoint
from motet.export.hf_folder import ExportSettings, export_to_hf
from motet.parallel.process.process_group import RankGroup
from motet.train.build import build_components, precision_context
from motet.train.job import Job, load_job
from ranks import Ranks

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft", reason="PEFT is not installed")
pytest.importorskip("accelerate", reason="Trainer needs Accelerate")
STEPS, ROWS, RATE = 6, 4, 0.01


def run_in_motet(group: RankGroup, job: Job, folder: str) -> tuple[list[float], list[Tensor]]:
    """The losses of the steps, and their tokens: of each row one more than the model reads."""
    with precision_context(job):
        parts = build_components(job, group, Path(folder))
        stepper, losses, rows = parts.make_train_step(job), [], []
        for step in range(STEPS):
            batch = parts.data.batch(step, range(ROWS))
            rows.append(torch.cat((batch.tokens, batch.targets[:, -1:]), 1))
            losses.append(stepper.step(step, RATE).loss)
        parts.state.save(STEPS)
        return losses, rows


def run_in_trainer(model: nn.Module, rows: list[Tensor], folder: Path) -> list[float]:
    """The losses of the same steps."""

    class InOrder(transformers.Trainer):  # type: ignore[misc]  # transformers has no types
        def _get_train_sampler(self, *_: Any) -> torch.utils.data.Sampler[int]:
            return torch.utils.data.SequentialSampler(examples)

    examples: Any = [{"input_ids": row, "labels": row} for step in rows for row in step]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=ROWS,
        max_steps=STEPS,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.1,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = InOrder(model=model, args=arguments, train_dataset=examples)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.proof
def test_losses_and_adapters_are_those_of_trainer(ranks: Ranks, tmp_path: Path) -> None:
    transformers.utils.logging.set_verbosity_error()
    base, adapters = tmp_path / "base", tmp_path / "adapters"
    config = transformers.AutoConfig.for_model("llama", **TINY_CONFIGS["llama"] | {"vocab_size": 264})
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Deprecated names inside the libraries
        module = transformers.AutoModelForCausalLM.from_pretrained(base)
        lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = peft.get_peft_model(module, lora)
        model.save_pretrained(adapters)
    job = load_job(
        "tiny",
        [
            *(f"model={{factory='hf:{base}'}}", "model.adapters.rank=4", "model.adapters.alpha=8"),
            *("model.adapters.targets=['*.q_proj', '*.v_proj']", f"model.adapters.weights={adapters}"),
            *(f"data.source={TEXT}", "data.tokenizer=bytes", "data.sequence_length=32", f"data.batch_sequences={ROWS}"),
            *(f"data.cache={tmp_path}", "data.workers=1", "data.restart_documents=false", "precision.recipe=fp32"),
            *(f"run.steps={STEPS}", "run.device=cpu", "monitor.tensorboard=false"),
        ],
    )
    (tmp_path / "run").mkdir()
    (losses, rows), *_ = ranks.run(1, run_in_motet, job, str(tmp_path / "run"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = run_in_trainer(model, rows, tmp_path / "trainer")
        model.save_pretrained(tmp_path / "trained")
    assert losses == pytest.approx(theirs, abs=2e-4)  # Trainer rounds to four digits
    with open_checkpoint(tmp_path / "run") as checkpoint:
        export_to_hf(job, checkpoint, tmp_path / "out", settings=ExportSettings(adapters="peft"), log=print)
    names = ("before", "ours", "theirs")
    before, ours, trained = (
        load_file(folder / "adapter_model.safetensors") for folder in (adapters, tmp_path / "out", tmp_path / "trained")
    )
    assert ours.keys() == trained.keys() == before.keys(), names
    for name, value in trained.items():
        update = (value - before[name]).norm()
        assert update > 0 and (ours[name] - value).norm() <= 1e-3 * update, name
