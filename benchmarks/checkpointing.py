"""Cost of saving against `torch.save` + fsync of the same bytes, and the wait of training for a background save.

    python benchmarks/checkpointing.py [--parameters 60_000_000] [--rounds 7] [--folder .] [--device cuda]

Prints a table and, as its last line, the same figures as JSON. Rounds are interleaved, so that other
work on the machine and the disk meets every variant; figures are medians, ratios are medians of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from trainkit.checkpoint.background_save import BackgroundSave, CpuSnapshot, save_copy
from trainkit.checkpoint.store import CheckpointStore


def main() -> None:
    arguments = _arguments()
    payload = gpt_payload(arguments.parameters, arguments.device)
    size = sum(tensor.nbytes for tensor in tensors(payload))
    folder = Path(tempfile.mkdtemp(prefix="checkpointing-", dir=arguments.folder))
    try:
        rounds = measured(payload, folder, arguments.rounds)
    finally:
        shutil.rmtree(folder)
    report(rounds, parameters=arguments.parameters, size=size)


def measured(payload: dict[str, Any], folder: Path, num_rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every variant, round by round."""
    store = CheckpointStore(folder / "checkpoints")
    seconds: dict[str, list[float]] = {}

    def note(name: str, work: Callable[[], object]) -> None:
        with settled():
            start = time.perf_counter()
            work()
            seconds.setdefault(name, []).append(time.perf_counter() - start)

    saves: list[BackgroundSave] = []
    with closing(CpuSnapshot()) as snapshot:
        snapshot.reserve(payload)
        for round_ in range(num_rounds):
            place = {"step": round_, "epoch": 0}
            # The order turns from round to round: whoever comes after a long write finds the disk's cache fuller.
            variants = [
                ("plain", lambda: plain_save(payload, folder / "plain.pt")),
                ("store", lambda place=place: store.save(payload, name="store", **place)),
                (
                    "background_wait",
                    lambda place=place: saves.append(save_copy(store, payload, snapshot, name="background", **place)),
                ),
            ]
            for name, work in variants[round_ % 3 :] + variants[: round_ % 3]:
                note(name, work)
                if name == "background_wait":
                    start = time.perf_counter()
                    saves.pop().wait()
                    seconds.setdefault("background_total", []).append(
                        seconds["background_wait"][-1] + time.perf_counter() - start
                    )
                for entry in store.entries():
                    store.delete(entry)
                (folder / "plain.pt").unlink(missing_ok=True)
    return seconds


def plain_save(payload: dict[str, Any], path: Path) -> None:
    with open(path, "wb") as file:
        torch.save(payload, file)
        file.flush()
        os.fsync(file.fileno())


def gpt_payload(parameters: int, device: str = "cpu") -> dict[str, Any]:
    """Return the state of a GPT with about that many parameters after a step of AdamW."""
    width, layers = 512, max(1, round((parameters - 512 * 50_000) / (12 * 512 * 512)))
    shapes = {"embedding.weight": (50_000, width)}
    for layer in range(layers):
        shapes |= {
            f"layers.{layer}.attention.weight": (3 * width, width),
            f"layers.{layer}.project.weight": (width, width),
            f"layers.{layer}.widen.weight": (4 * width, width),
            f"layers.{layer}.narrow.weight": (width, 4 * width),
            f"layers.{layer}.norm.weight": (width,),
        }
    names = ("model", "exp_avg", "exp_avg_sq")
    return {name: {key: torch.randn(shape, device=device) for key, shape in shapes.items()} for name in names}


def tensors(payload: dict[str, Any]) -> Iterator[torch.Tensor]:
    for group in payload.values():
        yield from group.values()


@contextmanager
def settled() -> Iterator[None]:
    """Flush all pending writes to the disk."""
    os.sync()
    yield


def report(rounds: dict[str, list[float]], *, parameters: int, size: int) -> None:
    plain, store, wait = rounds["plain"], rounds["store"], rounds["background_wait"]
    figures = {
        "benchmark": "checkpointing",
        "parameters": parameters,
        "megabytes": round(size / 1e6, 1),
        "rounds": len(plain),
        "plain_s": round(median(plain), 3),
        "store_s": round(median(store), 3),
        "background_wait_s": round(median(wait[1:] or wait), 4),
        "background_first_wait_s": round(wait[0], 4),
        "background_total_s": round(median(rounds["background_total"]), 3),
        "store_to_plain": round(median(ours / theirs for ours, theirs in zip(store, plain, strict=True)), 3),
        "store_to_plain_best": round(min(store) / min(plain), 3),
        "wait_to_store_best": round(min(wait) / min(store), 4),
        "load_average": round(os.getloadavg()[0], 1),
        "wait_to_store": round(median(ours / theirs for ours, theirs in zip(wait[1:], store[1:], strict=True)), 4),
    }
    print(f"{figures['megabytes']} MB, {figures['rounds']} rounds, medians")
    print(f"{'torch.save + fsync':<42}{figures['plain_s']:>9.3f} s")
    print(f"{'CheckpointStore.save':<42}{figures['store_s']:>9.3f} s   {figures['store_to_plain']:.2f}x plain")
    print(
        f"{'save_copy (what training waits for)':<42}{figures['background_wait_s']:>9.3f} s   "
        f"{100 * figures['wait_to_store']:.1f} % of a save; the first {figures['background_first_wait_s']:.3f} s"
    )
    print(f"{'save_copy, until it is on the disk':<42}{figures['background_total_s']:>9.3f} s")
    print(
        f"The best round of each, where others share the machine: save {figures['store_to_plain_best']:.2f}x plain, "
        f"wait {100 * figures['wait_to_store_best']:.1f} % of a save. Load average {figures['load_average']}."
    )
    print(json.dumps(figures))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure what saving costs.")
    parser.add_argument("--parameters", type=int, default=60_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", default=".", help="on the disk to measure")
    parser.add_argument("--device", default="cpu", help="of the tensors that are saved")
    return parser.parse_args()


if __name__ == "__main__":
    main()
