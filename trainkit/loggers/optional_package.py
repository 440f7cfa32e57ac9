"""Loggers whose destination needs a package of its own."""

from __future__ import annotations

from importlib.util import find_spec

from trainkit.errors import UserError


def require(package: str, *, extra: str, where: str) -> None:
    """Return if a package is installed; raise UserError with what to type if it is not. Nothing is imported."""
    if find_spec(package) is None:
        raise UserError(
            f"{where} needs the package '{package}', which is not installed: pip install 'trainkit[{extra}]'."
        )
