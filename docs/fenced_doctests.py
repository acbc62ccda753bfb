"""A griffe extension: doctests in docstrings become fenced blocks, which Markdown would otherwise read as quotes."""

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", flags=re.MULTILINE | re.DOTALL)


class FencedDoctests(griffe.Extension):
    """Puts each block that starts with `>>>` into a fence."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None and ">>> " in obj.docstring.value:
            text = obj.docstring.value
            obj.docstring.value = DOCTEST.sub(lambda found: f"```pycon\n{found.group(0)}\n```", text)
