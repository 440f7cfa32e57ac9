"""The mutants of the pretended device on this one: each wait of the library is removed, in a copy of the tree.

python -m tests.gpu.mutants FOLDER

That a mutant is not noticed is no failure: a real device is often quick enough to hide a missing wait.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.gpu.figures import failed, figure
from tests.gpu.install import link
from tests.gpu.runner import ROOT, SOURCES
from tests.pretended_cuda import VARIABLE
from tests.pretended_cuda.mutants import Mutant, everything, noticed

AT_ONCE = max(1, min(4, (os.cpu_count() or 2) // 4))


def main(folder: Path) -> None:
    """Note for each mutant which test turns red; fail if one does without a mutant."""
    mutants = everything()
    if VARIABLE in os.environ:  # a rehearsal
        mutants = mutants[:3]
    tests = tuple(dict.fromkeys(name for mutant in mutants for name in mutant.tests))
    unchanged = Mutant("nothing", mutants[0].file, mutants[0].line, mutants[0].line, tests)
    with ThreadPoolExecutor(AT_ONCE) as threads:
        list(threads.map(lambda mutant: attempt(mutant, folder / "site"), [unchanged, *mutants]))


def attempt(mutant: Mutant, site: Path) -> None:
    """Note what notices a mutant."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in SOURCES:
            path = ROOT / name
            (shutil.copytree if path.is_dir() else shutil.copy)(path, root / name)
        path = root / mutant.file
        original = path.read_text(encoding="utf-8")
        if original.count(mutant.line) != 1:
            failed(mutant.name, "has changed, mend the list")
            return
        path.write_text(original.replace(mutant.line, mutant.instead), encoding="utf-8")
        link(root, root / "site")
        outcome = noticed(mutant, root, {"here": _environment(root, site)})
    print(f"{mutant.file}: without {mutant.name}: {outcome}", flush=True)
    figure(f"without {mutant.name}", outcome)
    if mutant.name == "nothing" and outcome != "not noticed":
        failed("nothing", f"{outcome}, though nothing was removed")


def _environment(root: Path, site: Path) -> Mapping[str, str]:
    here = (str(ROOT), str(site))
    others = [path for path in os.environ["PYTHONPATH"].split(os.pathsep) if path not in here]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*others, str(root / "site"), str(root), str(site)])}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
