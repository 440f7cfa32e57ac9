"""Hooks of mkdocs: the table of all keys, made from signatures and docstrings, and the version below each page."""

from importlib.metadata import version
from typing import Any

_PLACE = "<!-- the keys -->"


def on_config(config: Any) -> Any:
    """Return the configuration with the version of what is documented."""
    config.copyright = f"trainkit {version('trainkit-torch')}"
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the page with the table in it."""
    if _PLACE not in markdown:
        return markdown
    from trainkit.cli.explain import key_reference

    return markdown.replace(_PLACE, key_reference())
