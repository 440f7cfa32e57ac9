"""`run_ranks`: a function on several ranks, from the caller's folder, with a time limit and nothing left behind."""

import os
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.program import PATIENCE, is_running, wait_until
from trainkit.distributed import launcher
from trainkit.distributed.collectives import gather
from trainkit.testing import RankFailure, rank_outcomes, run_ranks


def what_a_rank_sees(factor):
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    return dist.get_rank(), factor * total.item(), torch.get_num_threads(), os.getcwd()


def test_values_come_in_the_order_of_ranks_which_are_in_the_callers_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_ranks(what_a_rank_sees, 3, 10) == [(rank, 60.0, 1, str(tmp_path)) for rank in range(3)]


def failing_on_rank_1():
    if dist.get_rank() == 1:
        raise ValueError("no such luck")
    dist.barrier()


def test_the_first_failure_is_raised_with_its_traceback():
    with pytest.raises(RankFailure, match=r"(?s)^rank 1 of 2 failed:.*in failing_on_rank_1.*ValueError: no such luck"):
        run_ranks(failing_on_rank_1, 2)


def waiting(folder):
    pids = gather(os.getpid(), dist.group.WORLD)
    if dist.get_rank() == 1:
        wait_until(lambda: not is_running(pids[0]))
        (folder / "pids").write_text(f"{pids[0]} {pids[1]}")
        time.sleep(PATIENCE)


def test_ranks_that_do_not_end_in_time_show_where_they_are_and_are_killed(tmp_path, capfd, monkeypatch):
    looks = []

    def monotonic():
        """Time passes once the first rank has ended and the caller has looked for that."""
        looks.append((tmp_path / "pids").exists())
        return 1000.0 if sum(looks) > 1 else 0.0

    monkeypatch.setattr(launcher, "time", SimpleNamespace(monotonic=monotonic))
    first, second = rank_outcomes(waiting, 2, tmp_path, timeout=999.0)
    assert first.failure is None and "had not ended" in second.failure
    stacks = capfd.readouterr().err
    assert stacks.count("Fatal Python error: Aborted") == 1 and "in waiting" in stacks
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2 and not any(is_running(int(pid)) for pid in pids)


def killed():
    os.kill(os.getpid(), 9)


def test_the_failure_of_a_killed_rank_names_its_signal():
    with pytest.raises(RankFailure, match="the process was killed by SIGKILL"):
        run_ranks(killed, 1)


def test_what_other_processes_cannot_find_is_refused_with_what_to_do():
    def local():
        return 0

    with pytest.raises(ValueError, match="local must be at the top level of its file"):
        run_ranks(local, 1)
    with pytest.raises(ValueError, match=r"is not a function; pass what it binds as arguments: run_ranks\(fn, 2, "):
        run_ranks(partial(what_a_rank_sees, 10), 1)
