"""The structure of the source: import circles, folder docstrings, file names, config keys, and docs/architecture.md."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

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


def room_of(module: str) -> str:
    """Return the folder of a module, or the module itself if it lies at the top of a package."""
    package = next(name for name in reversed(sorted(IMPORT_NAMES.values())) if f"{module}.".startswith(f"{name}."))
    if package in ("trainkit.callbacks", "trainkit.recipes", "trainkit.conf"):
        return package
    folder = module if FILES[module].name == "__init__.py" else module.rpartition(".")[0]
    return module if folder == package else folder


def test_no_rooms_import_each_other_in_a_circle():
    graph: dict[str, set[str]] = {}
    for module, file in FILES.items():
        room = room_of(module)
        graph.setdefault(room, set()).update({room_of(other) for other in imported_modules(module, file)} - {room})
    while leaves := {room for room, imported in graph.items() if not imported & graph.keys()}:
        graph = {room: imported for room, imported in graph.items() if room not in leaves}
    while tops := graph.keys() - set().union(*graph.values(), set()):
        graph = {room: imported for room, imported in graph.items() if room not in tops}
    assert sorted(graph) == []


STRATEGIES = ("dp", "ddp", "torch_ddp", "fusion", "fsdp", "pipeline", "single")


def strategy_of(module: str) -> str:
    """Return the strategy that a module belongs to; "" if strategies share it."""
    name = room_of(module).removeprefix("trainkit.strategies.")
    return name if name in STRATEGIES else ""


def test_no_strategy_imports_another_one():
    assert set(map(strategy_of, FILES)) == {*STRATEGIES, ""}
    crossings = [
        f"{module} imports {imported}"
        for module, file in FILES.items()
        for imported in (imported_modules(module, file) if strategy_of(module) else ())
        if strategy_of(imported) not in ("", strategy_of(module))
    ]
    assert crossings == []


@pytest.mark.parametrize("folder", sorted({str(file.parent.relative_to(ROOT)) for file in FILES.values()}))
def test_every_folder_has_a_docstring_of_one_sentence(folder):
    docstring = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text()))
    assert docstring
    assert docstring.splitlines()[0].endswith(".")


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


KINDS_OF_DEVICES = ("cuda", "mps", "xpu")
MAY_NAME_KINDS = ("trainkit.devices", "trainkit.cli.")  # the command line asks what a machine has


def kinds_named(source: str) -> Iterator[str]:
    """Yield the places where code names a kind of device: `torch.cuda`, `tensor.is_cuda`, "cuda:0"."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr.removeprefix("is_") in KINDS_OF_DEVICES:
            yield f"line {node.lineno}: .{node.attr}"
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            name, _, index = node.value.partition(":")
            if name in KINDS_OF_DEVICES and (not index or index.isdigit()):
                yield f"line {node.lineno}: {node.value!r}"


def test_only_the_module_of_devices_names_a_kind_of_device():
    files = {module: file for module, file in FILES.items() if not f"{module}.".startswith(MAY_NAME_KINDS)}
    named = {module: places for module, file in files.items() if (places := list(kinds_named(file.read_text())))}
    assert named == {}
    assert len(list(kinds_named("tensor.is_cuda and torch.cuda.is_available() and device == 'cuda:1'"))) == 3
