"""Numbers, sizes and times as a person reads them."""

from __future__ import annotations

import math

_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")
_POWERS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def number(value: float) -> str:
    """Return a number with four significant digits: `12,345`, `0.01235`, `1.2e-05`, `28.7G`, `NaN`."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"
    if abs(value) >= 1e8:
        return short(float(f"{value:.4g}")) if abs(value) < 1e15 else f"{value:.4g}"
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"


def short(value: float) -> str:
    """Return a number for the ticks of an axis: `0.25`, `12k`, `3M`."""
    for power, letter in _POWERS:
        if abs(value) >= power:
            return f"{value / power:.4g}{letter}"
    return f"{value:.6g}"


def size(num_bytes: float) -> str:
    """Return a number of bytes as `12.3 MiB`."""
    for unit in _SIZES[:-1]:
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} {_SIZES[-1]}"


def seconds(value: float) -> str:
    """Return a short time as `12.3 ms` or `1.25 s`, and a long one as `1:02:03`."""
    if value < 1e-3:
        return f"{value * 1e6:.3g} µs"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    if value < 100:
        return f"{value:.3g} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d} min"


def share(value: float) -> str:
    """Return a share of one as `12.3 %`."""
    return f"{100 * value:.1f} %"


def ticks(low: float, high: float, *, count: int) -> list[float]:
    """Return about `count` round numbers from `low` to `high`."""
    if not high > low:
        return [low]
    rough = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]
