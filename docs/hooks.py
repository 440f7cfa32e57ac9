"""A hook of mkdocs that puts the table of all keys, made from signatures and docstrings, in its page."""

from typing import Any

_PLACE = "<!-- the keys -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the page with the table in it."""
    if _PLACE not in markdown:
        return markdown
    from trainkit.cli.explain import key_reference

    return markdown.replace(_PLACE, key_reference())
