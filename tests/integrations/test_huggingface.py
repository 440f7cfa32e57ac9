import json
import math
from copy import deepcopy
from functools import partialmethod

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import SequentialSampler, default_collate
from trainkit.strategies.pipeline.strategy import PipelineStrategy
from trainkit.strategies.single import SingleStrategy

from tests.tasks import fit as train
from trainkit.data.data import Data
from trainkit.errors import UserError
from trainkit.integrations.huggingface import HuggingFaceTask, LearningRateCurve

# The imports of transformers and datasets alone take as long as a hundred tests.
pytestmark = pytest.mark.slow

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
T5 = {
    "model_type": "t5",
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 1,
    "num_heads": 2,
    "vocab_size": 32,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


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
    return train(strategy, made, data, max_duration=f"{steps}step", run_dir=tmp_path, precision=precision)


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
    decayed, others = optimizer.param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert {parameter.dim() for parameter in decayed["params"]} == {2}
    assert {parameter.dim() for parameter in others["params"]} == {1}


@pytest.mark.parametrize("warmup", [0.0, 0.3, 0.5])
@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_the_learning_rate_is_that_of_transformers_at_every_step(schedule, warmup):
    from transformers import get_scheduler

    name = "constant_with_warmup" if schedule == "constant" else schedule
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    expected = get_scheduler(name, optimizer, num_warmup_steps=math.ceil(warmup * 7), num_training_steps=7)
    curve = LearningRateCurve(schedule, warmup=warmup, total_steps=7)
    for step in range(7):
        assert curve(step) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step()
        expected.step()


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
        ({"lora": {"rnk": 8}}, r"task\.lora\.rnk is unknown\. Did you mean 'rank'"),
        ({"lora": {"alpha": 8}}, r"task\.lora has no rank; type task\.lora\.rank=8"),
        ({"lora": {"rank": 0}}, r"task\.lora\.rank must be at least 1"),
        ({"lora": {"rank": 2, "targets": ["no_layer"]}}, r"task\.lora cannot be added to targets=\['no_layer'\]"),
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
        ({**T5, "decoder_start_token_id": 3}, {"decoder_start_token_id": 3}),  # read, and not declared
        ({**LLAMA, "rope_theta": 500.0}, {"vocab_size": 32}),  # of earlier versions of transformers
    ],
)
def test_settings_that_all_models_share_or_once_had_are_kept(config, expected):
    made = task(auto_class="AutoModel", config=config).model.config
    assert {name: getattr(made, name) for name in expected} == expected


# ---- Models for transformers and peft


def changed(made):
    """Return the task with other values in its trained parameters, as after training."""
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return made.eval()


IDS = torch.arange(6)[None]


def described(folder):
    """Return what transformers and vLLM read in a folder: its files, the class, and names, shapes and dtypes."""
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    files = {path.name for path in folder.iterdir() if path.is_file()}
    return files, config["architectures"], {name: (each.shape, each.dtype) for name, each in tensors.items()}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's own
@pytest.mark.parametrize("lora", [None, {"rank": 2}, {"rank": 2, "targets": ["query", "c_attn"], "alpha": 4}])
@pytest.mark.parametrize(
    ("auto_class", "config"), [("AutoModelForCausalLM", GPT), ("AutoModelForSequenceClassification", BERT)]
)
def test_a_saved_model_is_loaded_by_transformers_and_computes_the_same(auto_class, config, lora, tmp_path, request):
    import transformers

    if lora is not None:
        request.getfixturevalue("peft")
    made = changed(task(auto_class=auto_class, config=config, lora=lora))
    before = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    made.save_pretrained(tmp_path)
    loaded = getattr(transformers, auto_class).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(IDS).logits, made.model(IDS).logits, rtol=0, atol=1e-5)
    task(auto_class=auto_class, config=config).model.save_pretrained(tmp_path / "own")
    assert described(tmp_path) == described(tmp_path / "own")
    after = made.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's own
def test_a_large_model_is_saved_in_shards_that_the_index_lists(tmp_path, monkeypatch, peft):
    import transformers

    kind = transformers.PreTrainedModel
    monkeypatch.setattr(kind, "save_pretrained", partialmethod(kind.save_pretrained, max_shard_size="4KB"))
    made = changed(task(lora={"rank": 2}))
    made.save_pretrained(tmp_path)
    of_names = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    shards = {path.name: load_file(path) for path in tmp_path.glob("*.safetensors")}
    assert len(shards) > 1
    assert of_names == {name: file for file, tensors in shards.items() for name in tensors}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(IDS).logits, made.model(IDS).logits, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's own
def test_an_adapter_is_loaded_by_peft_with_the_trained_head(tmp_path, peft):
    import transformers

    auto_class = "AutoModelForSequenceClassification"
    pretrained = task(auto_class=auto_class, config=BERT)
    pretrained.save_pretrained(tmp_path / "pretrained")
    settings = {"auto_class": auto_class, "config": None, "pretrained": str(tmp_path / "pretrained")}
    made = task(**settings, lora={"rank": 2})
    trained = {name for name, parameter in made.named_parameters() if parameter.requires_grad}
    assert all("lora_" in name or "model.classifier" in name for name in trained)
    assert any("model.classifier" in name for name in trained)
    changed(made).save_pretrained(tmp_path / "adapter", adapter_only=True)
    base = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "pretrained").eval()
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    torch.testing.assert_close(loaded(input_ids=IDS).logits, made.model(IDS).logits, rtol=0, atol=1e-5)
    assert peft.PeftConfig.from_pretrained(tmp_path / "adapter").task_type == "SEQ_CLS"
    with pytest.raises(UserError, match=r"no adapter; train it with task\.lora\.rank=8"):
        pretrained.save_pretrained(tmp_path / "none", adapter_only=True)


def test_a_model_that_began_with_pretrained_weights_is_saved_with_their_tokenizer(tmp_path):
    from transformers import AutoTokenizer

    task().save_pretrained(tmp_path / "pretrained")
    tokenizer().save_pretrained(tmp_path / "pretrained")
    task(config=None, pretrained=str(tmp_path / "pretrained")).save_pretrained(tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("word5")["input_ids"] == [5]


# ---- With transformers' own collators and Trainer


def tokenizer():
    """Return a tokenizer of 32 words, made here instead of downloaded."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"[PAD]": 0, "[UNK]": 1, "[MASK]": 2, **{f"word{number}": number for number in range(3, 32)}}
    model = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]")


def unequal_rows(num_samples=12, **columns):
    from datasets import Dataset

    ids = [list(range(3, 6 + row % 5)) for row in range(num_samples)]
    return Dataset.from_dict({"input_ids": ids, **columns})


def test_a_collator_that_pads_makes_the_batches_of_rows_without_a_format(tmp_path):
    from transformers import DataCollatorWithPadding

    rows = unequal_rows(labels=[row % 3 for row in range(12)])
    data = Data(train=rows, validation=rows, batch_size=4, collate_fn=DataCollatorWithPadding(tokenizer()))
    made = task(auto_class="AutoModelForSequenceClassification", config=BERT)
    assert "validation/accuracy" in fit(made, data, strategy=SingleStrategy(), tmp_path=tmp_path).metrics


def test_a_collator_that_masks_words_weighs_each_batch_by_its_masked_words(tmp_path):
    from transformers import DataCollatorForLanguageModeling

    rows, collate = unequal_rows(), DataCollatorForLanguageModeling(tokenizer(), mlm_probability=0.5, seed=0)
    made = task(auto_class="AutoModelForMaskedLM", config={**BERT, "num_labels": 2})
    batch = collate([rows[index] for index in range(4)])
    assert int(made.training_step(batch)["weight"]) == int((batch["labels"] != -100).sum())
    data = Data(train=rows, batch_size=4, collate_fn=collate)
    assert fit(made, data, strategy=SingleStrategy(), tmp_path=tmp_path, steps=4).steps == 4


def test_rows_of_unequal_length_name_the_collate_function(tmp_path):
    rows = unequal_rows(labels=[row % 3 for row in range(12)])
    made = task(auto_class="AutoModelForSequenceClassification", config=BERT)
    with pytest.raises(UserError, match=r"cannot be made a batch.* Data\(collate_fn=function\)"):
        fit(made, Data(train=rows, batch_size=4), strategy=SingleStrategy(), tmp_path=tmp_path)


@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize(
    ("auto_class", "config"),
    [("AutoModelForSequenceClassification", {**BERT, **NO_DROPOUT}), ("AutoModelForSeq2SeqLM", T5)],
)
def test_the_weights_are_those_of_the_trainer_of_transformers(auto_class, config, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *args, **kwargs):
            return SequentialSampler(self.train_dataset)

    is_classifier = config["model_type"] == "bert"
    rows = sentences()
    if is_classifier:
        rows = rows.remove_columns("labels").add_column("labels", [row % 3 for row in range(12)]).with_format("torch")
    made = task(auto_class=auto_class, config=config, learning_rate=1e-2, weight_decay=0.1)
    theirs = deepcopy(made.model).double()
    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path / "theirs"),
        max_steps=6,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        weight_decay=0.1,
        lr_scheduler_type="linear",
        max_grad_norm=1.0,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    InOrder(model=theirs, args=settings, train_dataset=rows).train()
    settings = {"max_duration": "6step", "max_grad_norm": 1.0, "precision": "fp64", "run_dir": tmp_path / "own"}
    train("single", made, Data(train=rows, batch_size=4, shuffle=False), **settings)
    for (name, own), their in zip(made.model.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, their, rtol=0, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


def with_prepared_masks(rows):
    batch = default_collate(rows)
    attends = batch["attention_mask"].bool()
    batch["attention_mask"] = attends[:, None, None].expand(-1, 1, attends.shape[1], -1)
    return batch


def test_a_pipeline_trains_padded_batches_whose_masks_were_prepared_to_the_weights_of_one_device(tmp_path):
    lengths = [4 - row % 3 for row in range(8)]
    masks = [[int(place < length) for place in range(4)] for length in lengths]
    ids = torch.randint(1, 32, (8, 4), generator=torch.Generator().manual_seed(1)) * torch.tensor(masks)
    columns = {"input_ids": ids.tolist(), "attention_mask": masks, "labels": [row % 3 for row in range(8)]}
    from datasets import Dataset

    rows = Dataset.from_dict(columns).with_format("torch")
    weights = []
    for strategy, collate in (
        (SingleStrategy(device="cpu"), default_collate),
        (PipelineStrategy(device="cpu", stages=2), with_prepared_masks),
    ):
        config = {**BERT, **NO_DROPOUT, "num_hidden_layers": 2}
        made = task(auto_class="AutoModelForSequenceClassification", config=config, learning_rate=1e-2)
        data = Data(train=rows, batch_size=4, collate_fn=collate)
        fit(made, data, strategy=strategy, tmp_path=tmp_path / type(strategy).__name__, precision="fp64")
        weights.append(torch.cat([parameter.detach().flatten() for parameter in made.parameters()]))
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-9)


def test_a_pipeline_that_meets_padded_batches_says_how_masks_are_prepared(tmp_path):
    rows = [{"input_ids": torch.ones(4).long(), "labels": torch.tensor(0)} for _ in range(8)]
    for number, row in enumerate(rows):
        row["attention_mask"] = torch.tensor([1, 1, 1, int(number < 4)])  # the first batch has no padding
    made = task(auto_class="AutoModelForSequenceClassification", config={**BERT, "num_hidden_layers": 2})
    data = Data(train=rows, batch_size=4, shuffle=False)
    with pytest.raises(UserError, match="masks of attention with 4 dimensions"):
        fit(made, data, strategy=PipelineStrategy(device="cpu", stages=2), tmp_path=tmp_path)
