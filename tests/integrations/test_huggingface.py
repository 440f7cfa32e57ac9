import math

import pytest
import torch
from torch.utils.data import default_collate
from trainkit.strategies.single import SingleStrategy

from trainkit.data.data import Data
from trainkit.errors import UserError
from trainkit.integrations.huggingface import HuggingFaceTask, LearningRateCurve
from trainkit.trainer import Trainer

GPT = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 32, "n_positions": 16}
BERT = {
    "model_type": "bert",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 32,
    "num_labels": 3,
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 32,
}


def task(**settings):
    torch.manual_seed(0)
    return HuggingFaceTask(**{"auto_class": "AutoModelForCausalLM", "config": GPT, **settings})


def sentences(num_samples=12):
    from datasets import Dataset

    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 32, (num_samples, 8), generator=generator)
    labels = ids.clone()
    for row in range(num_samples):
        labels[row, : row % 5] = -100  # samples with different numbers of counted tokens
    rows = {"input_ids": ids.tolist(), "labels": labels.tolist(), "note": ["not for the model"] * num_samples}
    return Dataset.from_dict(rows).with_format("torch")


def fit(made, data, *, strategy, tmp_path, steps=3, precision="fp32"):
    trainer = Trainer(
        strategy, max_duration=f"{steps}step", run_dir=tmp_path, callbacks=[], loggers=[], precision=precision
    )
    return trainer.fit(made, data)


def test_a_language_model_trains_from_its_configuration_on_a_dataset_of_the_datasets_package(tmp_path):
    data = Data(train=sentences(), validation=sentences(), batch_size=4, seed=0)
    result = fit(
        task(learning_rate=1e-2, schedule="constant"), data, strategy=SingleStrategy(), tmp_path=tmp_path, steps=9
    )
    assert result.metrics["validation/loss"] < 3.3  # ln 32 = 3.47 before


def test_tokens_count_equally_for_any_split_into_micro_batches(tmp_path):
    no_dropout = {**GPT, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    weights = []
    for accumulate in (1, 3):
        made = task(config=no_dropout, learning_rate=1e-2)
        data = Data(train=sentences(), batch_size=6, seed=0)
        folder = tmp_path / str(accumulate)
        fit(made, data, strategy=SingleStrategy(accumulate=accumulate), tmp_path=folder, steps=1, precision="fp64")
        weights.append(torch.cat([parameter.detach().flatten() for parameter in made.parameters()]))
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-5)


def test_the_weight_of_a_language_model_is_the_number_of_tokens_it_predicts():
    batch = default_collate([sentences()[index] for index in (0, 4)])
    output = task().training_step(batch)
    assert int(output["weight"]) == 7 + 4


def test_a_micro_batch_without_labelled_tokens_has_no_weight(tmp_path):
    """The models' own loss is then the mean over nothing, which is NaN."""
    no_dropout = {**GPT, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    rows = [sentences()[index] for index in range(4)]
    silent = [{**row, "labels": torch.full_like(row["labels"], -100)} for row in rows]
    weights = []
    for samples, accumulate in ((silent + rows, 2), (rows, 1)):
        made = task(config=no_dropout, learning_rate=1e-2, schedule="constant")
        data = Data(train=samples, validation=silent + rows, batch_size=len(samples), shuffle=False)
        strategy = SingleStrategy(accumulate=accumulate)
        result = fit(made, data, strategy=strategy, tmp_path=tmp_path / str(accumulate), steps=1, precision="fp64")
        weights.append(torch.cat([parameter.detach().flatten() for parameter in made.parameters()]))
        assert math.isfinite(result.metrics["validation/loss"])
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-5)


def test_a_classifier_reports_its_accuracy():
    made = task(auto_class="AutoModelForSequenceClassification", config=BERT)
    batch = {"input_ids": torch.randint(0, 32, (4, 8)), "labels": torch.tensor([0, 1, 2, 0])}
    output = made.validation_step(batch)
    assert set(output) == {"loss", "accuracy"}
    assert made.predict_step(batch).shape == (4, 3)


def test_biases_and_norms_do_not_decay():
    optimizer, _ = task(weight_decay=0.1).configure_optimizers(total_steps=10)
    matrices, others = optimizer.param_groups
    assert (matrices["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert all(parameter.dim() == 1 for parameter in others["params"])


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.8536, 0.5, 0.1464]),
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_the_learning_rate_warms_up_and_then_follows_its_schedule(schedule, expected):
    curve = LearningRateCurve(schedule, warmup=1 / 3, total_steps=6)
    assert [curve(step) for step in range(6)] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"config": None}, "give one of task.config"),
        ({"config": {"model_type": "gtp2"}}, "gpt2"),
        ({"config": {**BERT, "hiden_size": 8}}, r"task\.config\.hiden_size.*=bert\. Did you mean 'hidden_size'"),
        ({"config": {**GPT, "n_embed": 8}}, r"task\.config\.n_embed is not a setting .* Did you mean 'n_embd'"),
        ({"auto_class": "AutoModelForCausalML"}, "AutoModelForCausalLM"),
        ({"schedule": "liner"}, "linear"),
        ({"config": None, "pretrained": "no/such_folder"}, "could not be loaded"),
        ({"auto_class": "AutoModelForImageClassification"}, "does not make"),
    ],
)
def test_a_model_that_cannot_be_built_is_rejected_with_a_hint(settings, message, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=message):
        task(**settings)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({**GPT, "hidden_size": 8}, {"n_embd": 8}),  # under the name that all models share
        ({**BERT, "attn_implementation": "eager", "id2label": {0: "a", 1: "b", 2: "c"}}, {"num_labels": 3}),
        ({**LLAMA, "rope_theta": 500.0}, {"vocab_size": 32}),  # of earlier versions of transformers
    ],
)
def test_settings_that_all_models_share_or_once_had_are_kept(config, expected):
    made = task(auto_class="AutoModel", config=config).model.config
    assert {name: getattr(made, name) for name in expected} == expected
