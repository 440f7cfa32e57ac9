"""The runner of the stages, on stages of a few lines; and the size of a pack."""

from __future__ import annotations

import json
import time
from pathlib import Path

from tests.gpu.pack import too_large
from tests.gpu.runner import Runner, Stage, mark_of, processes_of

OK = "from tests.gpu.figures import figure; figure('seconds', 0.5)"
FAILING = "from tests.gpu.figures import failed, figure; figure('late', 1); failed('copy', 'too early')"
HANGING = (
    "import subprocess, sys, time\n"
    "def hangs_here(): time.sleep(600)\n"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
    "hangs_here()"
)


def stage(name: str, code: str, *, expected: float = 0, limit: float = 60) -> Stage:
    return Stage(name, lambda _: ["-c", code], expected, limit)


def results(folder: Path) -> dict[str, dict]:
    lines = [json.loads(line) for line in (folder / "stages.jsonl").read_text().splitlines()]
    return {line["stage"]: line for line in lines}


def test_stages_that_fail_and_hang_are_recorded_and_the_next_one_runs(tmp_path, capsys):
    stages = [stage("hanging", HANGING, limit=3), stage("failing", FAILING), stage("dying", "exit(3)"), stage("ok", OK)]
    assert Runner(tmp_path, deadline=time.monotonic() + 60).run(stages) == 1
    found = results(tmp_path)
    assert {name: line["ok"] for name, line in found.items()} == {
        "hanging": False,
        "failing": False,
        "dying": False,
        "ok": True,
    }
    assert found["failing"]["failed"] == {"copy": "too early"} and found["failing"]["figures"] == {"late": 1}
    assert found["dying"]["failed"] == {"dying": "exit code 3"}
    assert "not ended after 3 s" in found["hanging"]["failed"]["hanging"]
    assert "in hangs_here" in (tmp_path / "hanging.log").read_text()
    assert found["ok"]["figures"] == {"seconds": 0.5}
    assert not processes_of(mark_of("hanging")), "what a stage started outlives it"
    assert "failing: copy: too early" in capsys.readouterr().out


def test_a_stage_that_was_ok_is_not_repeated_and_one_that_does_not_fit_is_left(tmp_path, capsys):
    stages = [stage("ok", OK), stage("long", OK, expected=1000)]
    for _ in range(2):
        assert Runner(tmp_path, deadline=time.monotonic() + 60).run(stages) == 1
    assert len((tmp_path / "stages.jsonl").read_text().splitlines()) == 1
    assert "left, as the time is short; type the same command again: long (1000 s)" in capsys.readouterr().out
    Runner(tmp_path, deadline=time.monotonic() + 60).run(stages, again=True)
    assert len((tmp_path / "stages.jsonl").read_text().splitlines()) == 2


def test_a_pack_that_is_too_large_is_refused_with_its_largest_wheels(tmp_path):
    for name, size in {"small-1.0": 100, "large-2.0": 4000}.items():
        (tmp_path / f"{name}-py3-none-any.whl").write_bytes(bytes(size))
    assert too_large(tmp_path, limit=0.1) is None
    refusal = too_large(tmp_path, limit=0.001)
    assert refusal is not None and "more than 0.001 MB. The largest: large 0.0 MB, small 0.0 MB." in refusal
