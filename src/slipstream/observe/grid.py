"""Rows of cells as aligned text. rich's own tables fill every line up with spaces, which then stand in logs and pipes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.text import Text

GAP = 2  # spaces between columns


def grid(rows: Sequence[Sequence[Text | str]], *, right: Collection[int] = (), bold: Collection[int] = ()) -> Text:
    """One line per row; columns as wide as their widest cell, those in `right` aligned to the right. No line ends with a space.

    >>> print(grid([["trained", "1 200", "the rest"], ["filtered", "7", ""]], right=[1]))
    trained   1 200  the rest
    filtered      7
    """
    cells = [[_cell(cell, column in bold) for column, cell in enumerate(row)] for row in rows]
    widths = [
        max((row[column].cell_len for row in cells if column < len(row)), default=0) for column in range(max(map(len, cells), default=0))
    ]
    return Text("\n").join(_line(row, widths, right) for row in cells)


def _cell(cell: Text | str, is_bold: bool) -> Text:
    text = cell.copy() if isinstance(cell, Text) else Text(cell)
    if is_bold:
        text.stylize("bold")
    return text


def _line(row: Sequence[Text], widths: Sequence[int], right: Collection[int]) -> Text:
    line, column_start = Text(), 0
    for column, cell in enumerate(row):
        shift = widths[column] - cell.cell_len if column in right else 0
        if cell.plain.strip():
            line.append(" " * (column_start + shift - line.cell_len)).append_text(cell)
        column_start += widths[column] + GAP
    line.rstrip()
    return line
