"""Ways to make a column of the data: taken from the data set, written by a template, or given by a function per row."""

from __future__ import annotations

import re
from string import Formatter

ANSWER = "answer"  # the column of right answers, if there is one
FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def is_function(how: str) -> bool:
    """True if this is a `module:function`."""
    return FUNCTION.fullmatch(how) is not None


def is_template(how: str) -> bool:
    return "{" in how or "}" in how


OWN_BRACE = "write {{ or }} for a brace of your own"


def template_parts(template: str) -> list[tuple[str, str]]:
    """Return (text, the column after it) for each part of a template; the last column may be "". Raises ValueError if
    the template is not valid."""
    parts = []
    try:
        found = [*Formatter().parse(template)]
    except ValueError as error:
        raise ValueError(f"{error}; {OWN_BRACE}") from None
    for text, column, form, conversion in found:
        if column is not None and (not column or form or conversion):
            raise ValueError(f"a place is a plain name in braces, as in 'Question: {{question}}'; {OWN_BRACE}")
        parts.append((text, column or ""))
    return parts


def columns_read(how: str) -> list[str]:
    """Columns of the data set that this reads; [] for a function, which may read any."""
    if is_function(how):
        return []
    if not is_template(how):
        return [how]
    return [column for _, column in template_parts(how) if column]
