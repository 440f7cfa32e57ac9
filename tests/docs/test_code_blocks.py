"""Every block of Python and shell in README.md and docs/ does what its page says.

A block with a title (```python title="mine.py") is a file that later blocks of its page find. Other Python blocks of a
page run one after the other in one namespace and one empty folder; a page that asks for its own name runs as a program.
Of shell blocks each `trainkit` line is run with a few small steps. A block below `<!-- not run: why -->` is not run,
but the settings that it types must be right. Other languages are rejected.
"""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.marks import needs_muon
from tests.program import Program
from tests.recipes.tiny import make_image_folder
from trainkit import registry
from trainkit.cli.main import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(
    r"(?P<skip><!-- not run: (?P<why>[^>]+) -->\s*\n)?"
    r"^(?P<indent> *)```(?P<language>[^\s`]*)(?: title=\"(?P<title>[^\"]+)\")?[^\n]*\n(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
RUN = "runs/digits/2026-01-31_12-00-00"  # the run that pages speak of
_SMALL = [
    "trainer.limit_train_batches=2",
    "trainer.limit_validation_batches=1",
    "trainer.max_duration=1epoch",
    "trainer.num_sanity_batches=0",
    "trainer.report=false",
]
_FEWER = {"hydra.launcher.n_jobs": 1, "hydra.sweeper.n_trials": 2}  # test_sweep.py runs two jobs side by side
_OTHER_PROGRAMS = {"make", "pip", "tensorboard", "python", "kill"}
_STARTERS = {"torchrun", "srun"}  # of `trainkit` on several machines
_RUN = {"python", "shell"}
_SHOWN = {"", "text"}  # drawings, and what is printed
_FILES = {"yaml"}  # has a title, and commands of its page that find it


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    title: str | None
    line: int
    skipped: bool


def all_blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            match["language"],
            textwrap.dedent(match["code"]),
            match["title"],
            text.count("\n", 0, match.start("code")) + 1,
            match["skip"] is not None,
        )
        for match in _BLOCK.finditer(text)
    ]


def blocks_of(page: Path) -> list[Block]:
    return [block for block in all_blocks_of(page) if not block.skipped]


def pages_with(language: str) -> list[Path]:
    return [page for page in PAGES if any(b.language == language and b.title is None for b in blocks_of(page))]


def commands_of(code: str) -> Iterator[list[str]]:
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        end = next((index for index, word in enumerate(words) if word in (">", "|")), len(words))
        if words[:end]:
            yield words[:end]


def write_files(page: Path, folder: Path) -> None:
    for block in blocks_of(page):
        if block.title is not None:
            path = folder / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.code, encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Be in an empty folder, from which modules can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_a_page_is_run_or_says_why_not(page: Path) -> None:
    fences = re.findall(r"^ *```", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(fences) == 2 * len(all_blocks_of(page)), f"{page.name}: a fence that this test does not understand"
    for block in all_blocks_of(page):
        place = f"{page.name}:{block.line}"
        if block.language == "toml":
            assert page.name == "extending.md", f"{place}: no test reads this"
        elif block.language in _FILES:
            assert block.title is not None, f"{place}: a file needs a title"
        else:
            assert block.language in _RUN | _SHOWN, f"{place}: no test runs {block.language}; write shell or python"


_ELSEWHERE = {"tutorial_equal_weights.md"}  # test_tutorial.py runs it, and reads what it prints
_MARKS = {
    **{name: [pytest.mark.slow] for name in ("custom_loop.md", "data.md", "integrations.md")},
    "extending.md": [needs_muon],
}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=_MARKS.get(page.name, []))
        for page in pages_with("python")
        if page.name not in _ELSEWHERE
    ],
)
def test_python_of_a_page_runs(page: Path, folder: Path) -> None:
    write_files(page, folder)
    blocks = [block for block in blocks_of(page) if block.language == "python" and block.title is None]
    if any('__name__ == "__main__"' in block.code for block in blocks):
        (folder / "page.py").write_text("\n".join(block.code for block in blocks), encoding="utf-8")
        with Program(runpy.run_path, str(folder / "page.py"), None, "__main__") as program:
            assert program.wait(300) == 0
        return
    namespace: dict[str, object] = {"__name__": "page"}
    for block in blocks:
        # Lines are counted as in the page, so that a traceback shows the line of the page.
        code = "\n" * (block.line - 1) + block.code
        exec(compile(code, str(page), "exec", dont_inherit=True), namespace)  # without this file's `annotations`
    if page.name == "README.md":
        result: Any = namespace["result"]
        assert result.metrics["validation/accuracy"] > 0.95


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_other_programs_of_a_page_are_known(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    extras = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for block in blocks_of(page):
        if block.language != "shell":
            continue
        for words in commands_of(block.code):
            if words[0] in {"trainkit", *_STARTERS}:
                continue
            assert words[0] in _OTHER_PROGRAMS, f"{page.name}:{block.line}: {words[0]} is not a known program"
            if words[0] == "make":
                assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), f"make {words[1]}"
            for names in re.findall(r"\[([\w,]+)\]", " ".join(words)) if words[0] == "pip" else []:
                for name in names.split(","):
                    assert re.search(rf"^{name} = \[", extras, re.MULTILINE), f"extra {name}"


@needs_muon
def test_parts_of_a_package_are_found_by_the_entry_points_that_are_shown(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = blocks_of(ROOT / "docs/extending.md")
    (shown,) = (tomllib.loads(block.code) for block in blocks if block.language == "toml")
    groups = shown["project"]["entry-points"]
    lines = [line for name, points in groups.items() for line in (f"[{name}]", *map(" = ".join, points.items()))]
    installed = folder / "my_package-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1\n")
    (installed / "entry_points.txt").write_text("\n".join(lines))
    page: dict[str, object] = {}
    code = "\n".join(block.code for block in blocks if block.language == "python")
    exec(compile(code, "extending.md", "exec", dont_inherit=True), page)
    for path in (path for points in groups.values() for path in points.values()):
        module, _, name = path.partition(":")
        found = ModuleType(module)
        monkeypatch.setattr(found, name, page[name], raising=False)
        monkeypatch.setitem(sys.modules, module, found)  # the package's own name is not needed
    registry._all_points.cache_clear()
    try:
        made = registry.make("strategy", "timed"), registry.make("callbacks", "stop_at_weight", {"limit": 1.0})
        assert [type(part) for part in (*made, registry.make("logger", "remember"))] == [
            page[name] for name in ("Timed", "StopAtWeight", "Remember")
        ]
    finally:
        registry._all_points.cache_clear()


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("finished")
    settings = ["recipe=digits", "task.width=4", "data.num_train=128", "trainer.max_duration=1epoch"]
    assert main(["fit", *settings, f"run_dir={parent / RUN}"]) == 0
    return parent


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with("shell"), ids=lambda page: page.name)
def test_trainkit_commands_of_a_page_run(
    page: Path, folder: Path, finished_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(page, folder)
    if not (folder / "conf").exists():
        (folder / "conf/recipe").mkdir(parents=True)
        recipe = ROOT / "conf/recipe/digits_mlp.yaml"
        (folder / "conf/recipe/mine.yaml").write_text(recipe.read_text(encoding="utf-8"), encoding="utf-8")
    if page.name == "recipes.md":
        make_image_folder(folder / "photos")
    for block in all_blocks_of(page):
        if block.language == "shell":
            for words in settings_typed_in(block.code) if block.skipped else trainkit_commands_of(block.code):
                if is_run_for_an_earlier_page(words, page):
                    continue
                copy_of_run(finished_run, folder)
                code = main(made_small(words))
                printed = capsys.readouterr()
                expected = 2 if "expected-error" in block.code else 0
                assert code == expected, f"{page.name}:{block.line}: {' '.join(words)}\n{printed.out}\n{printed.err}"


def trainkit_commands_of(code: str) -> Iterator[list[str]]:
    """Yield what follows `trainkit`; below `torchrun` and `srun` it is composed and not run."""
    for words in commands_of(code):
        if words[0] == "trainkit":
            yield words[1:]
        elif words[0] in _STARTERS:
            yield [*words[words.index("trainkit") + 1 :], "--cfg", "job"]


def is_run_for_an_earlier_page(words: list[str], page: Path) -> bool:
    """Whether the same command stands on an earlier page and finds the same there: no files of its page."""
    if "--config-dir" in words or any(block.title for block in blocks_of(page)):
        return False
    earlier = PAGES[: PAGES.index(page)]
    return any(
        words == others
        for block in (block for before in earlier for block in blocks_of(before))
        if block.language == "shell"
        for others in trainkit_commands_of(block.code)
    )


def settings_typed_in(code: str) -> Iterator[list[str]]:
    """Yield the commands that would train, but for sweeps, to be composed and not run."""
    for words in commands_of(code):
        if "trainkit" in words and "fit" in words and "-m" not in words:
            yield [*words[words.index("fit") :], "--cfg", "job"]


def copy_of_run(finished: Path, folder: Path) -> None:
    shutil.copytree(finished / RUN, folder / RUN, dirs_exist_ok=True)


def made_small(words: list[str]) -> list[str]:
    """Return a command that trains for two steps where it would have trained for long."""
    if words[0] not in ("fit", "resume") or {"--cfg", "--help", "-h"} & set(words):
        return words
    typed = {word.partition("=")[0] for word in words}
    words = [next((f"{key}={n}" for key, n in _FEWER.items() if word.startswith(f"{key}=")), word) for word in words]
    kept = [word for word in words if not word.startswith("trainer.max_duration=")]
    swept = [word for word in words if word.startswith("trainer.max_duration=") and "," in word and "[" not in word]
    small = _SMALL if words[0] == "fit" else ["trainer.max_duration=2epoch", "trainer.report=false"]
    small = [*small, "size=tiny"] if {"recipe=gpt", "recipe=char_lm"} & set(words) else small
    return [*kept, *swept, *(item for item in small if item.partition("=")[0] not in typed - {"trainer.max_duration"})]
