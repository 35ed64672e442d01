"""Files of models: a written file is read again, and a file without a model is refused in one sentence."""

import json
from pathlib import Path

import pytest

from motet.core.errors import InputError
from motet.models.spec.model_spec import spec_from_settings
from motet.models.spec.spec_file import read_spec_file, write_spec_file
from motet.train.job import builtin_jobs, load_job


@pytest.mark.parametrize("job", builtin_jobs())
def test_a_model_is_read_as_it_was_written(tmp_path: Path, job: str) -> None:
    path, spec = tmp_path / "model.json", spec_from_settings(load_job(job).model)
    write_spec_file(path, spec, source=job, dtype="bfloat16")
    file = read_spec_file(path)
    assert (file.source, file.dtype, file.spec, hash(file.spec)) == (job, "bfloat16", spec, hash(spec))


def test_files_that_are_no_model(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    write_spec_file(path, spec_from_settings(load_job("tiny").model), source="tiny", dtype="bfloat16")
    good = json.loads(path.read_text())

    def refusal(text: str) -> str:
        path.write_text(text)
        with pytest.raises(InputError) as caught:
            read_spec_file(path)
        assert "\n" not in str(caught.value) and "motet show model" in str(caught.value)
        return str(caught.value)

    assert "its text" in refusal("{") and "format" in refusal("{}")
    assert "format = 'other'" in refusal(json.dumps(good | {"format": "other"}))
    without_blocks = good | {"spec": {"blocks": []}}
    assert "a size in it is 0" in refusal(json.dumps(without_blocks))
    changes = (
        (("repeat",), -4, "spec.blocks.1.repeat = -4 must be at least 1"),
        (("layer", "operations", 1, "heads"), 0, "spec.blocks.1.layer.operations.1.heads = 0 must be at least 1"),
        (("layer", "saved", 0, "dtype"), "float5", "spec.blocks.1.layer.saved.0.dtype = 'float5' is not a dtype"),
        (("prefix",), "x", "spec.blocks.1.prefix = 'x' has no {i}"),
        (("repeat",), 10**18, "a size in it is"),
        (("name",), "head", "spec.blocks.2.name = 'head' is that of another layer; give it another name"),
    )
    for keys, value, message in changes:
        wrong = json.loads(json.dumps(good))
        inner = wrong["spec"]["blocks"][1]
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value
        assert message in refusal(json.dumps(wrong))
    good["spec"]["blocks"][1]["repeat"] = "four"
    assert "spec.blocks.1.repeat" in refusal(json.dumps(good))
    path.unlink()
    with pytest.raises(InputError, match="No such file"):
        read_spec_file(path)
