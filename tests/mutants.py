"""Breaks a file in many places, one at a time, and lists those that its tests do not notice.

    make mutants FILE=trainkit/data/order.py TESTS=tests/data/test_order.py [ARGS="--count 100 --seed 1"]

Cosmic Ray makes the mutants: operators, comparisons and numbers are replaced, loops left out, conditions negated. One
is tried in each of `--count` places, which are drawn by the seed. A mutant that nothing can observe is code that can
go. The file is put back after each one; after a kill, `git checkout` does it.
"""

from __future__ import annotations

import argparse
import ast
import random
import sys
from pathlib import Path

from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.testing import run_tests
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome

Span = tuple[tuple[int, int], tuple[int, int]]


def annotations(source: str) -> list[Span]:
    """Return the places of annotations, which are never evaluated."""
    spans = []
    for node in ast.walk(ast.parse(source)):
        for part in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if part is not None:
                spans.append(((part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)))
    return spans


def sample(file: Path, count: int, seed: int) -> list[MutationSpec]:
    """Return at most `count` mutations of a file, in the order of their places."""
    with use_db(":memory:", WorkDB.Mode.create) as database:
        init([file], database, {})
        mutations = [item.mutations[0] for item in database.work_items]
    ignored = annotations(file.read_text())
    by_place: dict[tuple[int, int], list[MutationSpec]] = {}
    for mutation in mutations:
        if not any(start <= mutation.start_pos < end for start, end in ignored):
            by_place.setdefault(mutation.start_pos, []).append(mutation)
    draw = random.Random(seed)
    places = sorted(draw.sample(sorted(by_place), min(count, len(by_place))))
    return [draw.choice(by_place[place]) for place in places]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("tests", nargs="+")
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for the tests of one mutant")
    options = parser.parse_args()
    command = f"{sys.executable} -m pytest -q -x -p no:cacheprovider {' '.join(options.tests)}"
    # A mutant counts as caught when the tests fail: they must pass without one.
    outcome, output = run_tests(command, options.timeout)
    if outcome != TestOutcome.SURVIVED:
        sys.exit(f"the tests fail without a mutant:\n{output}")
    num_caught = 0
    mutations = sample(options.file, options.count, options.seed)
    for mutation in mutations:
        result = mutate_and_test([mutation], command, options.timeout)
        if result.test_outcome not in (TestOutcome.KILLED, TestOutcome.SURVIVED):
            sys.exit(f"{options.file}:{mutation.start_pos[0]}: not tried: {result.worker_outcome}\n{result.output}")
        is_caught = result.test_outcome == TestOutcome.KILLED  # a time limit too
        num_caught += is_caught
        if not is_caught:
            print(f"{options.file}:{mutation.start_pos[0]}: {mutation.operator_name}\n{result.diff}\n", flush=True)
    print(f"{num_caught} of {len(mutations)} mutants caught")


if __name__ == "__main__":
    main()
