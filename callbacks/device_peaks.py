"""What CUDA devices can do at most, as their makers say: dense matrix products, in 1e12 operations a second."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class _Peak:
    half: float
    """Factors of 16 bits (bf16, fp16)."""
    tf32: float
    single: float
    """Plain fp32."""


# The longest name that is part of the device's name counts.
_PEAKS = {
    "V100": _Peak(125.0, 15.7, 15.7),
    "T4": _Peak(65.0, 8.1, 8.1),
    "A100": _Peak(312.0, 156.0, 19.5),
    "A10": _Peak(125.0, 62.5, 31.2),
    "A10G": _Peak(70.0, 35.0, 31.5),
    "A30": _Peak(165.0, 82.0, 10.3),
    "A40": _Peak(149.7, 74.8, 37.4),
    "L4": _Peak(121.0, 60.0, 30.3),
    "L40": _Peak(181.0, 90.5, 90.5),
    "L40S": _Peak(362.0, 183.0, 91.6),
    "H100": _Peak(989.4, 494.7, 66.9),
    "H100 PCIe": _Peak(756.0, 378.0, 51.0),
    "H200": _Peak(989.4, 494.7, 66.9),
    "B200": _Peak(2250.0, 1125.0, 80.0),
    "RTX 3090": _Peak(71.0, 35.6, 35.6),
    "RTX 4090": _Peak(165.2, 82.6, 82.6),
}


def peak_of(device: torch.device, *, precision: str, tf32: bool) -> tuple[float | None, str]:
    """Return a device's peak in operations a second and what it is, or `None` for one that is not known."""
    if device.type != "cuda":
        return None, ""
    return peak_of_model(torch.cuda.get_device_name(device), precision=precision, tf32=tf32)


def peak_of_model(name: str, *, precision: str, tf32: bool) -> tuple[float | None, str]:
    """Return the same for a model by its name."""
    words = f" {name.replace('-', ' ')} "
    known = [model for model in _PEAKS if f" {model} " in words]
    if not known or precision == "fp64":
        return None, ""
    peak = _PEAKS[max(known, key=len)]
    value = peak.half if precision != "fp32" else peak.tf32 if tf32 else peak.single
    return value * 1e12, f"of {value:g} TFLOP/s for each device ({name}, {precision}{' with TF32' if tf32 else ''})"
