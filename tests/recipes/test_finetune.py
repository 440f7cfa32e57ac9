"""Adapters beside a language model: only they are trained, and merged into it they compute the same."""

from importlib.util import find_spec

import pytest
import torch
from trainkit.recipes.finetune import FineTune

from tests.tasks import fit
from trainkit.data.data import Data
from trainkit.errors import UserError

pytestmark = pytest.mark.skipif(not (find_spec("transformers") and find_spec("peft")), reason="needs peft")


class _Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        tokens = (torch.arange(8) * 3 + index) % 257
        return {"input_ids": tokens, "labels": tokens}


def test_only_adapters_are_trained_and_the_merged_model_computes_the_same(tmp_path, peft):
    torch.manual_seed(0)
    task = FineTune(lora={"rank": 2}, lr=1e-2)
    before = {name: tensor.clone() for name, tensor in task.state_dict().items()}
    trained = {name for name, parameter in task.named_parameters() if parameter.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    layers = [module for module in task.modules() if isinstance(module, peft.tuners.lora.LoraLayer)]
    assert len(layers) == 2 * 4  # four linear layers in each of two blocks, and not the last one
    fit("single", task, Data(train=_Rows(), batch_size=8), max_duration="4step", run_dir=tmp_path)
    changed = {name for name, tensor in task.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == trained
    tokens = torch.arange(6)[None]
    task.eval()
    with torch.no_grad():
        beside = task.model(input_ids=tokens).logits
        for layer in layers:
            layer.merge()
        merged = {name: tensor for name, tensor in task.state_dict().items() if "base_layer" in name}
        assert any(not torch.equal(tensor, before[name]) for name, tensor in merged.items())
        assert torch.allclose(task.model(input_ids=tokens).logits, beside, atol=1e-5)


def test_a_rank_of_zero_is_rejected():
    with pytest.raises(UserError, match=r"task\.lora\.rank must be at least 1"):
        FineTune(lora={"rank": 0})


def test_a_peft_that_transformers_does_not_take_is_named(monkeypatch):
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "99.1")
    with pytest.raises(UserError, match=r"task\.lora cannot be added .*PEFT .* 99\.1"):
        FineTune(lora={"rank": 2})
