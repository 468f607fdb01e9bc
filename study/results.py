"""Tables of studies, as Markdown: on the screen, in a file, in docs/results.md."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
DOCUMENT = DOCS / "results.md"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table.

    >>> print(markdown(["a", "b"], [["1", "2"]]))
    | a | b |
    | --- | --- |
    | 1 | 2 |
    """
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def publish(
    name: str, text: str, folder: Path, *, write: bool, document: Path | None = None
) -> None:
    """Prints a study's result, saves it, and on request replaces it in the document.

    Args:
      name: of the study; its place in the document lies between the comments
        ``<!-- NAME -->`` and ``<!-- end -->``.
      text: Markdown.
      folder: where ``table.md`` is saved.
      write: also put it into the document.
      document: by default docs/results.md.

    Raises:
      ValueError: the document has no place for this study.
    """
    print(text)
    (folder / "table.md").write_text(text + "\n")
    if not write:
        return
    document = document or DOCUMENT
    old = document.read_text()
    place = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not place.search(old):
        raise ValueError(f"{document.name} has no place `<!-- {name} -->`.")
    document.write_text(place.sub(lambda m: f"{m[1]}{text}\n{m[2]}", old, count=1))
    print(f"Written into docs/{document.name}.")
