"""The structure of the source: import circles, folder docstrings, file names, config keys, and docs/architecture.md."""

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from trainkit.cli.validate import RENAMED

ROOT = Path(__file__).parents[2]
IMPORT_NAMES = {
    "trainkit": "trainkit",
    "strategies": "trainkit.strategies",
    "callbacks": "trainkit.callbacks",
    "recipes": "trainkit.recipes",
    "conf": "trainkit.conf",
}


def source_files() -> dict[str, Path]:
    """Return every module's import name and file; project templates are data."""
    files = {}
    for folder, name in IMPORT_NAMES.items():
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = [name, *file.relative_to(ROOT / folder).with_suffix("").parts]
            if "template" not in parts:
                files[".".join(parts).removesuffix(".__init__")] = file
    return files


FILES = source_files()


def imported_modules(module: str, file: Path) -> Iterator[str]:
    """Yield the project's modules that a file imports anywhere: at the top, in functions, and for types alone."""
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*above, node.module] if node.module else above)
            names = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in FILES else base for alias in node.names]
        else:
            continue
        for name in names:
            if name in FILES and name != module and FILES[name].name != "__init__.py":
                yield name


def test_no_files_import_each_other_in_a_circle():
    graph = {module: set(imported_modules(module, file)) for module, file in FILES.items()}
    while leaves := {module for module, imported in graph.items() if not imported & graph.keys()}:
        graph = {module: imported for module, imported in graph.items() if module not in leaves}
    while tops := graph.keys() - set().union(*graph.values(), set()):
        graph = {module: imported for module, imported in graph.items() if module not in tops}
    assert sorted(graph) == []


@pytest.mark.parametrize("folder", sorted({str(file.parent.relative_to(ROOT)) for file in FILES.values()}))
def test_every_folder_has_a_docstring_of_one_sentence(folder):
    docstring = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text()))
    assert docstring
    assert docstring.splitlines()[0].endswith(".")


OLD_FILE_NAMES = frozenset(
    [
        "absences",
        "accepted",
        "agreement",
        "alike",
        "arguments",
        "assembly",
        "averaged_weights",
        "batches",
        "before_step",
        "bonds",
        "buckets",
        "choice",
        "class_balance",
        "clipping",
        "collective",
        "combinations",
        "command",
        "command_help",
        "command_line",
        "communication_hooks",
        "compilation",
        "config_changes",
        "config_tree",
        "content",
        "continuation",
        "cutting",
        "descriptions",
        "device_peaks",
        "digest",
        "disk",
        "environment",
        "evaluation",
        "event_file",
        "event_mode",
        "events",
        "exact_means",
        "extras",
        "failure_part",
        "faking",
        "feed",
        "filling",
        "flights",
        "followed_file",
        "frames",
        "functions",
        "gantt",
        "gradient_bucket",
        "graph_walk",
        "grid",
        "group_talk",
        "hardware",
        "histogram",
        "hook_choice",
        "hook_run",
        "host_buffers",
        "host_memory",
        "hosts",
        "hyperparameters",
        "interop",
        "joint",
        "key_reference",
        "known_keys",
        "lane_watch",
        "launch_queue",
        "left_out",
        "left_out_words",
        "length_groups",
        "lightning_logging",
        "lightning_optimizers",
        "linear_scaling",
        "listing",
        "live_display",
        "location",
        "looking_back",
        "manual_cuts",
        "markup",
        "matching",
        "materializing",
        "measuring",
        "messages",
        "metric_charts",
        "metric_objects",
        "metric_states",
        "metric_updates",
        "mistakes",
        "model_settings",
        "module_scopes",
        "no_gradient",
        "numbers",
        "objective",
        "observation",
        "opening",
        "optimization",
        "optional_package",
        "origins",
        "overlap",
        "overlap_watch",
        "overlap_window",
        "parallel",
        "parity_causes",
        "part_transport",
        "parts",
        "peak_memory",
        "picture",
        "placement",
        "planning",
        "prepared_folder",
        "preview",
        "problem",
        "process_group",
        "python_generators",
        "rank",
        "ranking",
        "reading",
        "ready_feed",
        "recipe_table",
        "recorder",
        "recording",
        "recovery",
        "reducer_settings",
        "refusal",
        "replay",
        "run_lock",
        "run_page",
        "sample_feed",
        "sampling",
        "save_retries",
        "scaffold",
        "scaled_together",
        "scatter",
        "segments",
        "sessions",
        "settings",
        "several_datasets",
        "sharding",
        "shards",
        "sharing",
        "slurm",
        "slurm_ranks",
        "source",
        "spikes",
        "staged_ranks",
        "staged_state",
        "staged_step",
        "staged_task",
        "staging",
        "step_cost",
        "step_replay",
        "step_watch",
        "stop_agreement",
        "stopwatch",
        "stream_feed",
        "structures",
        "sweep_page",
        "threads",
        "torch_reducer_times",
        "trial",
        "uneven",
        "untouched",
        "warning_log",
        "way_back",
        "weight_decay",
        "whereabouts",
        "whole_state",
        "window",
        "window_run",
        "within_memory",
        "worker_stream",
        "writing",
    ]
)


@pytest.mark.parametrize("module", sorted(FILES))
def test_no_file_has_a_former_name(module):
    assert module.rpartition(".")[2] not in OLD_FILE_NAMES


def parameters_of(target: str) -> list[str]:
    """Return the parameters of the class or function with this import path."""
    module, _, name = target.rpartition(".")
    return list(inspect.signature(getattr(import_module(module), name)).parameters)


def config_keys() -> set[str]:
    """Return every key of conf/ and every constructor parameter, by its path in the config."""
    keys = {f"trainer.{name}" for name in parameters_of("trainkit.trainer.Trainer")}
    keys |= {f"data.{name}" for name in parameters_of("trainkit.data.data.Data")}
    for group in ("strategy", "callbacks", "logger"):
        for file in (ROOT / "conf" / group).glob("*.yaml"):
            content = yaml.safe_load(file.read_text())
            nodes = (
                {group: content} if "_target_" in content else {f"{group}.{name}": content[name] for name in content}
            )
            for path, node in nodes.items():
                keys.add(path)
                if isinstance(node, dict) and "_target_" in node:
                    keys |= {f"{path}.{name}" for name in (*node, *parameters_of(node["_target_"]))}
    for file in (ROOT / "conf" / "recipe").glob("*.yaml"):
        for name, value in yaml.safe_load(file.read_text())["task"].items():
            keys |= {f"task.{name}", *(f"task.{name}.{key}" for key in (value if isinstance(value, dict) else ()))}
    return keys


KEYS = config_keys()


@pytest.mark.parametrize("key", sorted(RENAMED))
def test_no_config_key_has_a_former_name(key):
    assert key not in KEYS


@pytest.mark.parametrize("key", sorted(set(RENAMED.values())))
def test_a_former_key_is_answered_with_a_key_that_exists(key):
    assert key in KEYS


def test_the_map_names_files_that_exist():
    named = set(re.findall(r"`([\w/]+\.py)`", (ROOT / "docs" / "architecture.md").read_text()))
    assert len(named) > 30
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


OLD_DISTRIBUTION = re.compile(
    r"pip install[^\n`]*\btrainkit(?![\w-])|\btrainkit\[|^name = \"trainkit\"|\[\"trainkit\"\]$", re.MULTILINE
)


def test_no_message_installs_the_package_of_the_index_that_has_the_import_name():
    suffixes = (".py", ".md", ".toml", ".txt", ".template", ".yaml")
    tops = (
        "trainkit",
        "strategies",
        "callbacks",
        "recipes",
        "conf",
        "docs",
        "benchmarks",
        "README.md",
        "pyproject.toml",
        "constraints.txt",
        "CONTRIBUTING.md",
        "Makefile",
    )
    files = [file for top in tops for file in [ROOT / top, *(ROOT / top).rglob("*")]]
    texts = {file: file.read_text(encoding="utf-8") for file in files if file.is_file() and file.suffix in suffixes}
    assert sum("trainkit-torch" in text for text in texts.values()) > 10
    assert [str(file) for file, text in texts.items() if OLD_DISTRIBUTION.search(text)] == []
