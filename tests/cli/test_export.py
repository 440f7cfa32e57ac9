"""`trainkit export` writes weights that other programs read."""

import shutil
import sys

import numpy as np
import pytest
import torch
from trainkit.recipes.digits_mlp import DigitsMLP

from tests.tasks import Regression, SaveAtEnd, StopAt, regression_data
from trainkit import Data
from trainkit.checkpoint.store import load_from
from trainkit.cli.export import write_safetensors
from trainkit.cli.main import main
from trainkit.errors import UserError

safetensors = pytest.importorskip("safetensors")
TINY = [
    *("recipe=digits_mlp", "data.num_train=32", "data.batch_size=16", "task.width=8", "trainer.max_duration=2step"),
    *("run_dir=run", "logger=[]"),
]


class Tied(Regression):
    def __init__(self):
        super().__init__(hidden=4)
        self.same = self.network[0].weight
        self.register_buffer("table", torch.arange(12).reshape(3, 4).t())

    def get_extra_state(self):
        return {"words": ["a"]}

    def set_extra_state(self, state):
        pass


@pytest.fixture
def run_dir(make_trainer):
    trainer = make_trainer(callbacks=[StopAt(2), SaveAtEnd()], max_duration="3step")
    trainer.fit(Tied(), Data(train=regression_data(12), batch_size=4))
    return trainer.run_dir


def read(path):
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def test_the_last_checkpoint_is_exported_under_the_tasks_own_names(run_dir, tmp_path, capsys):
    out = tmp_path / "new" / "model.safetensors"
    assert main(["export", f"checkpoint={run_dir}", f"out={out}"]) == 0
    weights, described = read(out)
    expected = load_from(run_dir).payload["task"]
    assert set(weights) == set(expected) - {"_extra_state"}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights.items())
    assert torch.equal(weights["same"], weights["network.0.weight"])
    assert (described["step"], described["task"].rpartition(".")[2]) == ("2", "Tied")
    assert "6 tensors of step 2 in" in capsys.readouterr().out
    assert [path.name for path in out.parent.iterdir()] == ["model.safetensors"]


def test_a_checkpoint_can_be_named(run_dir, tmp_path):
    assert main(["export", f"{run_dir}/step_00000002", f"out={tmp_path}/model.safetensors"]) == 0
    assert read(tmp_path / "model.safetensors")[1]["step"] == "2"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["out=m.safetensors"], "export needs a run"),
        (["checkpoint=RUN"], "export needs a checkpoint and an output file"),
        (["checkpoint=RUN", "out=model.pt"], "must end in .safetensors for the weights, or in .pt2"),
        (["checkpoint=RUN", "out=model.pt2"], "is empty: the run was started from Python"),
        (["checkpoint=RUN", "out=m.safetensors", "checkpont=best"], "Did you mean 'checkpoint'?"),
        (["checkpoint=RUN/step_9", "out=m.safetensors"], "has no checkpoint 'step_9'"),
        (["checkpoint=RUN", "out=FILE/m.safetensors"], "cannot be written"),
        (["checkpoint=RUN", "out=model", "format=hugingface"], "Did you mean 'huggingface'?"),
    ],
)
def test_each_wrong_argument_is_one_message(run_dir, tmp_path, capsys, words, message):
    (tmp_path / "FILE").touch()
    places = {"RUN": str(run_dir), "FILE": str(tmp_path / "FILE")}
    for name, place in places.items():
        words = [word.replace(name, place) for word in words]
    assert main(["export", *words]) == 2
    assert message in capsys.readouterr().err


def test_weights_are_exported_without_the_package(run_dir, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert main(["export", f"checkpoint={run_dir}", f"out={tmp_path}/m.safetensors"]) == 0


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    *(torch.bool, torch.complex64),
]


def test_every_dtype_and_shape_is_read_by_the_package(tmp_path):
    shapes = [(), (0, 3), (1,), (3, 5)]
    tensors = {
        f"{dtype} {shape}": torch.ones(shape).to(dtype) if shape else torch.tensor(1).to(dtype)
        for dtype in DTYPES
        for shape in shapes
    }
    with open(tmp_path / "m.safetensors", "wb") as file:
        write_safetensors(file, tensors, {"step": "1"})
    found, described = read(tmp_path / "m.safetensors")
    assert int.from_bytes((tmp_path / "m.safetensors").read_bytes()[:8], "little") % 8 == 0
    assert described == {"step": "1"}
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def test_a_dtype_that_the_format_lacks_is_named(tmp_path):
    with (
        open(tmp_path / "m.safetensors", "wb") as file,
        pytest.raises(UserError, match=r"w is torch\.complex128, which"),
    ):
        write_safetensors(file, {"w": torch.zeros(2, dtype=torch.complex128)}, {})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # torch.export's own
def test_a_trained_task_is_exported_as_a_program_for_any_number_of_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    settings = ["trainer.deferred_init=true", "callbacks.checkpoint.trainable_only=true"]  # with nothing frozen
    assert main(["fit", *TINY, *settings]) == 0
    assert main(["export", "run", "out=model.pt2"]) == 0
    assert "DigitsMLP.predict_step of step 2 in model.pt2" in capsys.readouterr().out
    task = DigitsMLP(width=8)
    task.load_state_dict(load_from(tmp_path / "run").payload["task"])
    program = torch.export.load("model.pt2").module()
    for num_rows in (1, 5):
        batch = [torch.randn(num_rows, 1, 8, 8), torch.zeros(num_rows, dtype=torch.int64)]
        assert torch.equal(program(batch), task.eval().predict_step(batch))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # torch's own
def test_an_onnx_file_computes_the_predictions_for_any_number_of_rows(tmp_path, monkeypatch, capsys):
    pytest.importorskip("onnxscript")
    reference = pytest.importorskip("onnx.reference")
    monkeypatch.chdir(tmp_path)
    assert main(["fit", *TINY]) == 0
    assert main(["export", "run", "out=model.onnx"]) == 0
    assert "DigitsMLP.predict_step of step 2 in model.onnx, with the inputs batch_0" in capsys.readouterr().out
    task = DigitsMLP(width=8)
    task.load_state_dict(load_from(tmp_path / "run").payload["task"])
    evaluator = reference.ReferenceEvaluator("model.onnx")
    for num_rows in (1, 5):
        images = torch.randn(num_rows, 1, 8, 8)
        inputs = dict.fromkeys(evaluator.input_names, np.zeros(num_rows, np.int64)) | {"batch_0": images.numpy()}
        (found,) = evaluator.run(None, inputs)
        torch.testing.assert_close(torch.from_numpy(found), task.eval().predict_step([images, None]))


def test_what_onnx_needs_is_named_where_it_is_not_installed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["fit", *TINY]) == 0
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert main(["export", "run", "out=model.onnx"]) == 2
    assert "needs the package 'onnx', which is not installed. Type: pip install" in capsys.readouterr().err


def test_a_task_that_cannot_be_traced_is_reported_with_the_reason(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "branching.py").write_text(
        "from trainkit.recipes.digits_mlp import DigitsMLP\n\n\n"
        "class Branching(DigitsMLP):\n"
        "    def predict_step(self, batch):\n"
        "        return self(batch[0]) if batch[0].sum() > 0 else self(batch[0]) + 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["fit", *TINY, "task._target_=branching.Branching"]) == 0
    assert main(["export", "run", "out=model.pt2", "--trust"]) == 2
    assert "Branching.predict_step cannot be traced as a program" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's own
def test_a_fine_tuned_model_is_exported_for_transformers_and_its_adapter_for_peft(tmp_path, monkeypatch, capsys, peft):
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    model = "{model_type: gpt2, n_layer: 1, n_head: 2, n_embd: 16, vocab_size: 257, n_positions: 32}"
    tiny = [f"task.config={model}", "task.lora.rank=2", "data.max_bytes=20000", "data.context=16"]
    tiny += ["trainer.max_duration=2step", "trainer.limit_validation_batches=1"]
    assert main(["fit", "recipe=finetune", *tiny, "run_dir=run", "logger=[]"]) == 0
    for name in ("huggingface", "peft"):
        assert main(["export", "run", f"out={name}", f"format={name}"]) == 0
    printed = capsys.readouterr().out
    assert "model of step 2 in huggingface: config.json, generation_config.json, model.safetensors" in printed
    assert "adapter of step 2 in peft: adapter_config.json, adapter_model.safetensors" in printed
    assert main(["export", "run", "out=peft", "format=peft"]) == 2
    assert "out=peft exists and is not an empty folder" in capsys.readouterr().err
    weights = load_from(tmp_path / "run").payload["task"]
    base = transformers.AutoModelForCausalLM.from_pretrained("huggingface")
    frozen = {name.removeprefix("model.").replace(".base_layer", ""): tensor for name, tensor in weights.items()}
    ids = torch.arange(6)[None]
    merged = base.eval()(ids).logits
    base.load_state_dict({name: tensor for name, tensor in frozen.items() if "lora_" not in name}, strict=False)
    torch.testing.assert_close(peft.PeftModel.from_pretrained(base, "peft").eval()(ids).logits, merged)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's own
def test_a_checkpoint_of_adapters_alone_resumes_and_is_exported_with_the_pretrained_weights(
    tmp_path, monkeypatch, capsys, peft
):
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(1)
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=257, n_positions=32)
    for name in ("base", "other"):
        transformers.GPT2LMHeadModel(config).save_pretrained(name)
    tiny = ["task.lora.rank=2", "data.max_bytes=20000", "data.context=16", "trainer.limit_validation_batches=1"]
    tiny += ["recipe=finetune", "logger=[]", "task.config=null", "trainer.max_duration=2step"]
    assert main(["fit", *tiny, "task.pretrained=base", "run_dir=whole"]) == 0
    tiny += ["callbacks.checkpoint.trainable_only=true"]
    assert main(["fit", *tiny, "task.pretrained=base", "run_dir=run"]) == 0
    assert all("lora_" in name for name in load_from(tmp_path / "run").payload["task"])
    for run in ("whole", "run"):
        assert main(["export", run, f"out={run}_model", "format=huggingface"]) == 0
    models = [transformers.AutoModelForCausalLM.from_pretrained(f"{run}_model") for run in ("whole", "run")]
    for expected, actual in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(actual, expected)
    assert main(["export", "run", "out=run.safetensors"]) == 0
    assert "frozen parameters, which are not in the checkpoint" in capsys.readouterr().out
    assert main(["resume", "run", "trainer.max_duration=3step"]) == 0
    shutil.move("base", "moved")
    shutil.move("other", "base")
    assert main(["resume", "run", "trainer.max_duration=4step"]) == 2
    assert "Build the task from the same pretrained weights (task.pretrained=...)" in capsys.readouterr().err


def test_a_task_without_a_model_of_transformers_is_not_exported_for_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["fit", *TINY]) == 0
    assert main(["export", "run", "out=model", "format=huggingface"]) == 2
    assert "DigitsMLP has no method save_pretrained" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()
