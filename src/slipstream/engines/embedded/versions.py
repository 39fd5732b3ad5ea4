"""Which weights made which keys and values."""

from __future__ import annotations

Version = tuple[int, int]  # (incarnation, version)


class VersionMarks:
    """Which weights made which positions' keys and values: `(start, version)` means from `start` on.

    >>> marks = VersionMarks()
    >>> marks.add(0, (1, 3)); marks.add(5, (1, 3)); marks.add(7, (1, 4)); marks.add(7, (1, 5))
    >>> marks.spans(9)
    ((0, 7, (1, 3)), (7, 9, (1, 5)))
    """

    __slots__ = ("_marks",)

    def __init__(self, marks: list[tuple[int, Version]] | None = None):
        self._marks = [] if marks is None else marks

    def add(self, start: int, version: Version) -> None:
        """From `start` on it is `version`, whatever was said before of positions from there on."""
        while self._marks and self._marks[-1][0] >= start:
            self._marks.pop()
        if not self._marks or self._marks[-1][1] != version:
            self._marks.append((start, version))

    def copy(self) -> VersionMarks:
        return VersionMarks(self._marks.copy())

    @property
    def first(self) -> Version:
        """Of position 0."""
        return self._marks[0][1]

    def spans(self, end: int) -> tuple[tuple[int, int, Version], ...]:
        """(start, end, version) of positions [0, end)."""
        starts = [*(start for start, _ in self._marks), end]
        return tuple((s, min(e, end), v) for (s, v), e in zip(self._marks, starts[1:], strict=True) if s < end)
