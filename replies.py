r"""The items in a model's reply: JSON that is broken in the ways in which models break it.

A reply may have prose, thinking and code fences around its JSON, LaTeX in its strings, a comma too
many, or no end. Nothing here knows what the items are about: the caller names their fields.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from files import encodable

Items = list[dict]

# LaTeX begins like JSON's \b, \f, \n, \r and \t, of which only line feeds and tabs are ever meant.
_COMMANDS = (
    "nabla|natural|ne|nearrow|neg|neq|newline|nexists|ngeq|ngtr|ni|nleq|nleqslant|nless|nmid|"
    "nolimits|nonumber|not|notin|nparallel|nprec|nsim|nsubseteq|nsucceq|nu|num|nwarrow"
)
# A backslash, and in group 1 all of an escape that JSON reads as the model meant it.
_BACKSLASH = re.compile(
    rf'(\\[\\"/]|\\u[0-9a-fA-F]{{4}}|\\(?!(?:{_COMMANDS})(?![a-zA-Z]))n|\\t(?![a-zA-Z]))|\\'
)
_OPENING = re.compile(r"[{\[]")
MAX_REPLY = 100_000  # characters of a reply that are read
MAX_EFFORT = 1_000_000  # characters decoded in vain: "[[[[..." would take quadratic time


def read_items(text: str, key: str, fields: Sequence[str]) -> tuple[Items, bool]:
    """A reply's items, and whether it was whole: not broken off, and every item in it valid.

    key: the name under which the list of items may stand in an object. fields: the strings that
    make a valid item; it keeps these and no others. Thinking, code fences and prose around the JSON
    are passed over; LaTeX backslashes and trailing commas are repaired; a single object counts as a
    list of one; of a reply that was cut off the complete items are kept. Never raises on a str.
    """
    spoken = text.rpartition("</think>")[2].partition("<think>")[0][:MAX_REPLY]
    escaped = _BACKSLASH.sub(lambda match: match[1] or r"\\", spoken)
    without_commas = re.sub(r",(\s*[}\]])", r"\1", escaped)
    # Taking out commas can also spoil a string that holds ",]", so the better reading counts.
    readings = [_scan(escaped, key, fields), _scan(without_commas, key, fields)]
    return max(readings, key=lambda reading: (reading[1], len(reading[0])))


def _scan(text: str, key: str, fields: Sequence[str]) -> tuple[Items, bool]:
    """`read_items` of the JSON in a text: a value is decoded at each opening bracket in turn."""
    decoder = json.JSONDecoder(strict=False)
    # A list promises items, so that an entry of it which is none makes the reply broken. An object
    # on its own promises nothing: it is an item, or it is looked into.
    of_lists: list[Any] = []
    on_their_own: list[Any] = []
    broken, at, effort = False, 0, 0
    while effort < MAX_EFFORT and (opening := _OPENING.search(text, at)):
        at = opening.end()
        try:
            value, end = decoder.raw_decode(text, opening.start())
        except (ValueError, RecursionError) as e:
            reached = e.pos if isinstance(e, json.JSONDecodeError) else len(text)
            effort += reached - at + 300  # an exception has its own price
            # A bracket before {, [ or a quote is JSON that broke off; any other is prose.
            broken = broken or text[at : at + 100].lstrip()[:1] in ("{", "[", '"')
            continue
        if isinstance(value, dict) and key in value:
            of_lists += value[key] if isinstance(value[key], list) else [value[key]]
        elif isinstance(value, list) and any(isinstance(v, dict) for v in value):
            of_lists += value
        elif item_of(value, fields):
            on_their_own.append(value)
        else:  # some other value: look inside
            effort += end - at
            continue
        at = end
    items = []
    for value in of_lists + on_their_own:
        item = item_of(value, fields)
        if item:
            items.append(item)
    whole = not broken and len(items) == max(1, len(of_lists))
    each_once = {tuple(item.values()): item for item in items}
    return list(each_once.values()), whole


def item_of(value: Any, fields: Sequence[str]) -> dict | None:
    """An item's own fields, stripped; None when one is missing, empty or not a string."""
    values = value if isinstance(value, dict) else {}
    texts = [values.get(name) for name in fields]
    if not all(isinstance(text, str) and text.strip() for text in texts):
        return None
    return {name: encodable(values[name].strip()) for name in fields}
