"""Storage: files and folders behind URLs such as `s3://bucket/run7`, through fsspec."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from trainkit.errors import UserError, nearest

# A scheme has two letters or more, so that `C:/runs` is a path. One slash is enough: a Path keeps one of two.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]+:/+")
_INSTALL = "pip install 'trainkit-torch[remote]'"
# Any part of a path except an empty one, `.` and `..`, which could lead out of the folder.
_NO_TRAVERSAL = re.compile(r"(?:[^/]*[^/.][^/]*|\.{3,})")


def is_url(path: object) -> bool:
    """Return True for a text that begins with a scheme (`s3://bucket`), and for the Path that was made of one."""
    return isinstance(path, (str, Path)) and _URL.match(str(path)) is not None


def local_path(path: str | Path, *, what: str) -> Path:
    """Return the path of a local file or folder; raises UserError for a URL, which would be a folder named `s3:`."""
    if is_url(path):
        raise UserError(f"{what} must be a local path, got the URL {str(path)!r}; copy it to a local folder first.")
    return Path(path)


def check_url(url: str | Path) -> str:
    """Return the URL without a slash at its end; raises UserError unless it names a folder or file."""
    if isinstance(url, Path):
        raise UserError(f"Path({str(url)!r}) has lost a slash of its URL; pass the URL as a string.")
    scheme, _, rest = url.partition("://")
    parts = rest.strip("/").split("/")
    if not all(_NO_TRAVERSAL.fullmatch(part) for part in parts):
        raise UserError(f"{url!r} does not name a folder or file; write a URL such as {scheme}://bucket/run7.")
    return url.rstrip("/")


def file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it. It may not be connected yet.

    Raises UserError for an unknown scheme, or if a package is not installed.
    """
    scheme = url.partition("://")[0]
    try:
        fsspec = import_module("fsspec")
    except ImportError:
        raise UserError(f"{url} needs the package 'fsspec', which is not installed: {_INSTALL}.") from None
    schemes = {*fsspec.available_protocols(), *fsspec.registry}
    if scheme not in schemes:
        raise UserError(
            f"{url}: the scheme {scheme!r} is unknown.{nearest(scheme, schemes)} Write a URL such as s3://bucket/run7 "
            "or file:///folder/run7, or a local path."
        )
    # A bucket has no folders to make; the local file system has.
    options = {"auto_mkdir": True} if scheme in ("file", "local") else {}
    try:
        # Without its cache of listings, which would not show what other processes write.
        fs, path = fsspec.core.url_to_fs(url, use_listings_cache=False, **options)
    except ImportError as error:
        raise UserError(f"{url} needs a package that is not installed ({error}). For s3: {_INSTALL}.") from None
    except (ValueError, TypeError) as error:
        raise UserError(f"{url} cannot be opened: {error}.") from None
    return fs, str(path)


@contextmanager
def store_errors(what: str) -> Iterator[None]:
    """Replace the errors of a store, of whatever type, by a UserError that begins with `what`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{what}: {error_text(error)}. Check the URL, the network and the credentials.") from error


def error_text(error: Exception) -> str:
    """Return the type and the first line of a store's error."""
    first = next(iter(str(error).splitlines()), "").rstrip(".")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def working_folder(path: str | Path) -> Path:
    """Return the local folder in which a run with this `run_dir` trains: `runs/s3/bucket/run7` for a URL."""
    return _below(Path("runs"), check_url(path)) if is_url(path) else Path(path)


def fetched_folder(url: str) -> Path:
    """Return the local folder for a run that is fetched to be read: `runs/fetched/s3/bucket/run7`."""
    return _below(Path("runs", "fetched"), check_url(url))


def _below(parent: Path, url: str) -> Path:
    scheme, _, rest = url.partition("://")
    return parent.joinpath(scheme, *filter(None, rest.split("/")))
