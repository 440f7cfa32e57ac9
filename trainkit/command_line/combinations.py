"""Settings that are right one by one and cannot be together; found by their keys alone, whatever the strategy is."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from trainkit.command_line.hardware import absence, num_gpus
from trainkit.command_line.problem import Problem
from trainkit.window import split_error


def impossible(settings: Mapping[str, Any], *, here: bool = True) -> Iterator[Problem]:
    """Yield what cannot be together; with `here`, also devices that this machine does not have."""
    strategy, data, trainer = (_mapping(settings.get(key)) for key in ("strategy", "data", "trainer"))
    yield from _batch(strategy, data)
    yield from _stages(strategy)
    yield from _processes(strategy)
    if here and strategy.get("launch") in (None, "auto", "local", "processes"):  # else devices are elsewhere
        yield from _devices(strategy)
    yield from _evaluation(trainer, _mapping(settings.get("callbacks")))
    if trainer.get("clip_norm") is not None and trainer.get("clip_value") is not None:
        yield Problem("trainer.clip_value", "excludes trainer.clip_norm; set one of them to null")


def _batch(strategy: Mapping[str, Any], data: Mapping[str, Any]) -> Iterator[Problem]:
    accumulate, size = strategy.get("accumulate"), strategy.get("micro_batch_size")
    if accumulate is not None and size is not None:
        yield Problem(
            "strategy.micro_batch_size",
            f"says the same as strategy.accumulate={accumulate} in another way; set one of them to null",
        )
        return
    batch_size = data.get("batch_size")
    if not _is_count(batch_size):
        return
    if _is_count(accumulate):
        complaint = split_error(batch_size, accumulate=accumulate, world_size=_ranks(strategy))
        if complaint is not None:
            yield Problem("strategy.accumulate", complaint)


def _stages(strategy: Mapping[str, Any]) -> Iterator[Problem]:
    stages, cuts = strategy.get("stages"), strategy.get("cuts")
    if not _is_count(stages) or not isinstance(cuts, list):
        return
    per_rank = strategy.get("stages_per_rank")
    if strategy.get("schedule") == "interleaved_virtual" and _is_count(per_rank):
        stages *= per_rank
    if len(cuts) != stages - 1:
        yield Problem(
            "strategy.cuts",
            f"{len(cuts)} cuts make {len(cuts) + 1} stages, not {stages}; name {stages - 1} modules, or set "
            f"strategy.stages={len(cuts) + 1}",
        )


def _processes(strategy: Mapping[str, Any]) -> Iterator[Problem]:
    """Check that those who joined the run are as many as its stages and replicas need."""
    joined, stages = _joined(), strategy.get("stages")
    replicas = strategy.get("replicas", 1)
    if joined and _is_count(stages) and _is_count(replicas) and stages * replicas != joined:
        fitting = f"; set strategy.replicas={joined // stages}" if joined % stages == 0 else ""
        yield Problem(
            "strategy.stages",
            f"{stages} stages x {replicas} replicas need {stages * replicas} processes, but there are {joined}"
            f"{fitting}",
        )


def _devices(strategy: Mapping[str, Any]) -> Iterator[Problem]:
    device, devices = strategy.get("device"), strategy.get("devices")
    named = devices if isinstance(devices, list) else []
    for key, name in [("device", device), *(("devices", name) for name in named)]:
        complaint = absence(name) if isinstance(name, str) else None
        if complaint is not None:
            yield Problem(f"strategy.{key}", complaint.replace("strategy.device=", f"strategy.{key}="))
            return
    backend = strategy.get("backend")
    if backend == "nccl" and device == "cpu":
        yield Problem("strategy.backend", "'nccl' joins CUDA devices only; set strategy.backend=gloo for device=cpu")
    elif backend == "nccl" and num_gpus() == 0:
        yield Problem("strategy.backend", "'nccl' joins CUDA devices, and there are none; set strategy.backend=auto")
    if device == "cuda" and backend != "gloo" and _is_count(devices) and devices > num_gpus() and not _joined():
        yield Problem("strategy.devices", f"{devices} ranks, but there are {num_gpus()} CUDA device(s)")


def _evaluation(trainer: Mapping[str, Any], callbacks: Mapping[str, Any]) -> Iterator[Problem]:
    if trainer.get("evaluate_every", "1epoch") is not None:
        return
    for name, node in callbacks.items():
        metric = _mapping(node).get("metric")
        # Without the metric a checkpoint callback only keeps no best ones; others have nothing left to do.
        if name != "checkpoint" and isinstance(metric, str) and metric.startswith("validation/"):
            yield Problem(
                "trainer.evaluate_every",
                f"null leaves callbacks.{name}.metric={metric} never measured; set a duration such as 1epoch, or "
                f"type ~callbacks.{name}",
            )


def _ranks(strategy: Mapping[str, Any]) -> int:
    """Return how many ranks share a batch, as far as it is said; a strategy with `device` has one a process."""
    joined, stages = _joined(), strategy.get("stages")
    if stages is not None:
        replicas = strategy.get("replicas", 1)
        return replicas if _is_count(replicas) else 1
    if "devices" not in strategy or "device" not in strategy:
        return 1
    return joined or (strategy["devices"] if _is_count(strategy["devices"]) else 1)


def _joined() -> int:
    """Return how many processes torchrun started, 0 without it."""
    count = os.environ.get("WORLD_SIZE", "") if "RANK" in os.environ else ""
    return int(count) if count.isdigit() else 0


def _mapping(node: Any) -> Mapping[str, Any]:
    return node if isinstance(node, Mapping) else {}


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
