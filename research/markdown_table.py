"""The lines of a table in Markdown."""

from collections.abc import Iterable


def row_of(cells: Iterable[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def head_of(cells: Iterable[object]) -> list[str]:
    """The columns' names and the rule below them."""
    names = list(cells)
    return [row_of(names), "|---" * len(names) + "|"]
