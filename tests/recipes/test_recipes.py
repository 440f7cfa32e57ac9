"""The recipes: their settings agree with their code, they run tiny, and digits learns."""

import functools
import json
import math
import sys
from importlib import resources

import numpy
import pytest
import torch
import yaml
from trainkit.recipes.char_lm import CharLM, SourceFiles, source_texts
from trainkit.recipes.digits import DigitsData, DigitsTask, read_scikit_learn
from trainkit.recipes.tabular import _FILES

from tests.recipes.tiny import RECIPES, TINY
from trainkit import Trainer, registry
from trainkit.cli.compose import compose_config
from trainkit.cli.main import main
from trainkit.cli.signatures import EXTRAS, signature_of
from trainkit.errors import UserError
from trainkit.testing import run_ranks


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


@functools.cache
def _tree(recipe):
    with compose_config() as composer:
        return composer.settings([f"recipe={recipe}"]).tree


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_argument_of_a_recipe_is_a_key_in_its_yaml(recipe):
    tree = _tree(recipe)
    for section in ("task", "data"):
        settings = {**tree[section]}
        target = settings.pop("_target_")
        assert set(settings) == set(signature_of(target).parameters)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_tiny_recipe_differs_only_in_keys_that_the_recipe_has(recipe):
    content = yaml.safe_load((resources.files("trainkit.conf") / f"recipe_size/{recipe}_tiny.yaml").read_text())
    tree = _tree(recipe)
    for section, values in content.items():
        assert set(values) <= set(tree[section])
        assert all(tree[section][key] != value for key, value in values.items())


def test_an_unknown_size_is_rejected_and_full_changes_nothing(tmp_path):
    own = tmp_path / "conf/recipe/mine.yaml"
    own.parent.mkdir(parents=True)
    own.write_text((resources.files("trainkit.conf") / "recipe/digits.yaml").read_text())
    with compose_config([own.parents[1]]) as composer:
        full = composer.settings(["recipe=mine"]).tree
        assert composer.settings(["recipe=mine", "size=full"]).tree == full
        with pytest.raises(UserError, match=r"recipe=mine has no such size.*recipe_size/mine_tiny\.yaml"):
            composer.settings(["recipe=mine", "size=tiny"])
        with pytest.raises(UserError, match=r"size=full"):
            composer.settings(["recipe=mine", "size=null"])
    (tmp_path / "conf/recipe_size").mkdir()
    (tmp_path / "conf/recipe_size/mine_tiny.yaml").write_text("# @package _global_\ntask:\n  width: 2\n")
    with compose_config([own.parents[1]]) as composer:
        tiny = composer.settings(["recipe=mine", "size=tiny"]).tree
        assert tiny["task"] == {**full["task"], "width": 2}
        assert composer.settings(["recipe=mine", "size=tiny", "task.width=3"]).tree["task"]["width"] == 3


ONE_BATCH = ["trainer.limit_validation_batches=1", "trainer.report=false"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_tiny_recipe_runs_with_every_callback(recipe, tmp_path):
    argv = [f"recipe={recipe}", *TINY[recipe], "trainer.max_duration=4step", *ONE_BATCH]
    assert main(["fit", *argv, "run_dir=run"]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 4
    losses = [value for name, value in summary["metrics"].items() if name.endswith("/loss")]
    assert losses and all(map(math.isfinite, losses))


NEEDED = {
    **dict.fromkeys(["digits", "digits_mlp", "contrastive", "gan", "tabular"], "recipes"),
    "finetune": "huggingface",
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_without_extras_a_tiny_recipe_runs_or_names_the_extra_it_needs(recipe, monkeypatch, capsys):
    for package in EXTRAS:  # as if it was not installed
        for name in [package, *(loaded for loaded in sys.modules if loaded.startswith(f"{package}."))]:
            monkeypatch.setitem(sys.modules, name, None)
    argv = ["fit", f"recipe={recipe}", "size=tiny", "trainer.fast_dev_run=true", "callbacks=[]", "logger=[]"]
    assert main(argv) == (2 if recipe in NEEDED else 0)
    hint = f"pip install 'trainkit-torch[{NEEDED.get(recipe)}]'"
    assert (hint in capsys.readouterr().err) is (recipe in NEEDED)
    assert main(["recipes"]) == 0
    (entry,) = (text for text in capsys.readouterr().out.split("\n\n") if text.split("=")[-1].strip() == recipe)
    assert (hint in entry) is (recipe in NEEDED)


@pytest.mark.slow
def test_digits_learns_ninety_eight_percent(tmp_path):
    assert main(["fit", "recipe=digits", "run_dir=run", "callbacks=[]", "logger=[]"]) == 0
    metrics = json.loads((tmp_path / "run" / "summary.json").read_text())["metrics"]
    assert metrics["validation/accuracy"] >= 0.98


def test_the_split_of_digits_is_disjoint_and_fixed():
    data = DigitsData()
    train, validation = data.dataset("train"), data.dataset("validation")
    assert (len(train), len(validation)) == (1437, 360)
    again = DigitsData(num_train=100)
    torch.manual_seed(7)
    assert torch.equal(again.dataset("train").tensors[0], train.tensors[0][:100])
    assert torch.equal(again.dataset("validation").tensors[0], validation.tensors[0])
    assert validation.tensors[1].bincount().min() > 20  # every digit is there


def read_before_and_after_the_import():
    """Return whether reading tables imports scikit-learn, and by table if it has the numbers of scikit-learn."""
    files = {"digits": ("digits.csv.gz", 0), **{name: (file, 1) for name, file in _FILES.items()}}
    read = {name: read_scikit_learn(file, header_lines=lines) for name, (file, lines) in files.items()}
    imports = "sklearn" in sys.modules
    from sklearn import datasets

    same = {}
    for name, table in read.items():
        theirs = getattr(datasets, f"load_{name}")()
        same[name] = numpy.array_equal(table, numpy.column_stack([theirs.data, theirs.target]))
    return imports, same


@pytest.mark.slow
def test_tables_of_scikit_learn_are_read_without_its_import():
    pytest.importorskip("sklearn")
    ((imports, same),) = run_ranks(read_before_and_after_the_import, 1)
    assert not imports
    assert same == dict.fromkeys(["digits", "breast_cancer", "wine", "iris"], True)


def test_digits_without_scikit_learn_name_the_package_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(UserError, match=r"pip install 'trainkit-torch\[recipes\]'"):
        DigitsData().dataset("train")


def test_the_language_model_is_causal():
    task = CharLM(context=12, width=16, layers=2, heads=2).eval()
    tokens = torch.randint(0, 256, (3, 12))
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 256
    with torch.no_grad():
        before, after = task(tokens), task(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_the_weight_of_a_step_is_the_number_of_bytes_without_padding():
    task = CharLM(context=8, width=16, layers=1, heads=2)
    windows = torch.randint(0, 256, (2, 9), dtype=torch.int16)
    windows[1, 4:] = -1
    output = task.training_step([windows])
    assert output["weight"] == 8 + 3
    assert output["bits_per_character"].item() == pytest.approx(output["loss"].item() / math.log(2))
    parts = [task.training_step([windows[:1]]), task.training_step([windows[1:, :5]])]
    mean = sum(part["loss"] * part["weight"] for part in parts) / output["weight"]
    assert torch.allclose(output["loss"], mean)


def test_the_loss_of_an_untrained_language_model_is_that_of_guessing():
    windows = torch.randint(0, 256, (8, 33), dtype=torch.int16)
    output = CharLM(context=32, width=64, layers=2).training_step([windows])
    assert output["bits_per_character"].item() == pytest.approx(8.0, abs=0.2)


def test_every_byte_of_every_file_is_a_target_once():
    data = SourceFiles(context=16, max_bytes=30_000)
    texts = source_texts(max_bytes=30_000)
    assert sum(len(text) for text in texts) <= 30_000
    train, validation = data.dataset("train").tensors[0], data.dataset("validation").tensors[0]
    targets = torch.cat([train, validation])[:, 1:]
    assert (targets != -1).sum() == sum(len(text) - 1 for text in texts)
    first = bytes(validation[0].tolist())
    assert first == texts[0][:17]


def test_too_few_bytes_are_rejected_with_a_sufficient_number():
    with pytest.raises(UserError, match=r"data\.max_bytes=100000"):
        SourceFiles(max_bytes=10).dataset("train")


def test_wrong_sizes_are_rejected_by_name():
    with pytest.raises(UserError, match=r"task\.heads=3"):
        CharLM(width=16, heads=3)
    with pytest.raises(UserError, match=r"task\.width"):
        DigitsTask(width=0)


def test_the_trainer_section_has_every_argument_of_the_trainer_with_its_default():
    with compose_config() as composer:
        tree = composer.settings([], needs_task=False).tree
    import inspect

    arguments = {
        name: list(parameter.default) if isinstance(parameter.default, tuple) else parameter.default
        for name, parameter in inspect.signature(Trainer).parameters.items()
        if name not in ("strategy", "run_dir", "callbacks", "loggers", "config")
    }
    assert tree["trainer"] == arguments


def test_hydra_and_yaml_read_the_same_settings():
    """The Python door reads them as plain YAML, which takes 1e-3 for a text."""
    with compose_config() as composer:
        for name in registry.names("strategy"):
            composed = composer.settings([f"strategy={name}"], needs_task=False).tree["strategy"]
            assert composed == registry._settings("strategy", name), yaml.safe_dump(composed)
        for group in ("callbacks", "logger"):
            names = registry.names(group)
            tree = composer.settings([f"{group}=[{','.join(names)}]"], needs_task=False).tree[group]
            for name in names:
                assert tree[name] == registry._settings(group, name), yaml.safe_dump(tree[name])
