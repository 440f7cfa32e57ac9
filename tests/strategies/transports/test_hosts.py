"""Hosts and their ranks."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainkit.strategies.transports.hosts import HostLayout, Link, slow_host

NETWORK = Path(__file__).parents[3] / "benchmarks/network.py"


@given(names=st.lists(st.sampled_from("abc"), min_size=1, max_size=9))
def test_every_rank_is_on_one_host_and_every_column_has_one_rank_of_each(names):
    hosts = HostLayout.of(names)
    assert sorted(itertools.chain(*hosts.ranks)) == list(range(len(names)))
    assert all(len({names[rank] for rank in ranks}) == 1 for ranks in hosts.ranks)
    columns = hosts.columns(hosts.fewest_ranks)
    assert len(columns) == hosts.fewest_ranks
    for column in columns:
        assert len({names[rank] for rank in column}) == len(column) == len(hosts.ranks)
    if hosts.is_even:
        assert sorted(itertools.chain(*columns)) == list(range(len(names)))


def test_columns_are_the_first_ranks_of_each_host_then_the_second_ones():
    hosts = HostLayout.of(["a", "a", "b", "b"])
    assert hosts.columns(2) == [(0, 2), (1, 3)]
    assert hosts.columns(1) == [(0, 2)]
    assert hosts.ranks_on_host(3) == (2, 3) and hosts.is_even
    assert not HostLayout.of(["a", "a", "b"]).is_even


# ---- Hosts made of network namespaces


@pytest.mark.slow
def test_two_hosts_of_two_ranks_send_only_what_they_must_and_train_as_one_device():
    command = [sys.executable, NETWORK, "--hosts", "2", "--ranks", "2", "--rate", "1000", "--rounds", "1", "--json"]
    ended = subprocess.run(
        [*command, "--contenders", "ddp", "fusion"], capture_output=True, text=True, timeout=300, check=False
    )
    if "cannot run here" in ended.stderr:
        pytest.skip(ended.stderr.strip())
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)["mlp5 2x2"]
    for name, row in found["contenders"].items():
        least = found["gradient_bytes"]  # 2 (H-1)/H of them, for two hosts
        assert max(row["bytes"]) <= 1.02 * least, name
        assert min(row["bytes"]) >= 0.98 * least, name  # even over the hosts, and nothing through shared memory
        assert row["difference"] < 1e-3, name


def links(*megabits: tuple[int, int, float]) -> list[Link]:
    return [Link(f"host{a}", f"10.0.0.{a}", f"10.0.0.{b}", int(rate * 125_000), 1.0) for a, b, rate in megabits]


def test_the_slow_host_is_the_one_without_a_fast_link():
    ring = links((0, 1, 20.0), (1, 2, 25.0), (2, 0, 900.0))
    assert slow_host(ring) == (
        "The link of host1 has carried 25 Mbit/s while it was busy, those of other hosts at least 900 Mbit/s: steps "
        "wait for host1."
    )
    assert slow_host(links((0, 1, 800.0), (1, 2, 700.0), (2, 0, 900.0))) is None
    assert slow_host(links((0, 1, 20.0), (1, 0, 25.0))) is None, "of two hosts the link is slow for both"
    assert slow_host([]) is None
