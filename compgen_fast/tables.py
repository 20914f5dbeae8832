"""Tables for a terminal of any width. Nothing in them is cut: words wrap, headers wrap between words, and numbers that
do not fit beside each other go into a further table below, which begins with the same words.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import takewhile

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

BETWEEN, AROUND = 2, 1  # places that a column's right side takes, and the table's left side
FOLDED = 20  # the least that is left to paths and the like, which may break anywhere


class Sheet:
    """A table of words, flush left, and of numbers, flush right.

    Args:
        head: names of the columns.
        words: names of those that hold words, the first alone if not given.
        keys: how many columns at the left tell rows apart and begin each table; if not given, those of words that
            come first, and at least one.
        folds: names of those whose words may break anywhere, such as paths.
        title: above it.
        caption: below it.
    """

    def __init__(
        self,
        *head: str,
        words: Collection[str] | None = None,
        keys: int | None = None,
        folds: Collection[str] = (),
        title: str = "",
        caption: str = "",
        show_header: bool = True,
    ) -> None:
        self.head, self.title, self.caption, self.show_header = head, title, caption, show_header
        self._words = frozenset(head[:1] if words is None else words)
        self._folds = frozenset(folds)
        self._keys = keys or max(1, len(list(takewhile(self._words.__contains__, head))))
        self.rows: list[tuple[Text, ...]] = []
        self._styles: list[tuple[str, bool]] = []

    def add_row(self, *cells: str | Text, style: str = "", end_section: bool = False) -> None:
        self.rows.append(tuple(cell if isinstance(cell, Text) else Text(cell) for cell in cells))
        self._styles.append((style, end_section))

    @property
    def numbers(self) -> list[int]:
        """The columns of numbers."""
        return [column for column, name in enumerate(self.head) if name not in self._words]

    def add_section(self) -> None:
        """A line below the last row."""
        if self._styles:
            self._styles[-1] = (self._styles[-1][0], True)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:
            yield Text(self.title, "bold")
        for columns in self._pieces(options.max_width):
            yield self._drawn(columns, options.max_width)
        if self.caption:
            yield Text(self.caption, "dim")

    def _pieces(self, room: int) -> Iterator[list[int]]:
        """Columns of each table: as few tables as possible, and about as many columns in each."""
        others = len(self.head) - self._keys
        tables = len(list(self._filled(others, room)))
        yield from self._filled(-(-others // tables), room)

    def _filled(self, most: int, room: int) -> Iterator[list[int]]:
        """Tables of at most so many columns beside the keys."""
        piece = keys = list(range(self._keys))
        for column in range(self._keys, len(self.head)):
            full = len(piece) == self._keys + most or _width(map(self._least, [*piece, column])) > room
            if full and len(piece) > self._keys:
                yield piece
                piece = keys
            piece = [*piece, column]
        yield piece

    def _drawn(self, columns: Sequence[int], room: int) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_header=self.show_header)
        for column, width in zip(columns, self._widths(columns, room), strict=True):
            name = self.head[column]
            table.add_column(
                Text(name), justify="left" if name in self._words else "right", width=width, overflow="fold"
            )
        for cells, (style, end_section) in zip(self.rows, self._styles, strict=True):
            table.add_row(*(cells[column] for column in columns), style=style, end_section=end_section)
        return table

    def _widths(self, columns: Sequence[int], room: int) -> list[int]:
        """Those that want least beyond the least get it first."""
        widths = {column: self._least(column) for column in columns}
        spare = room - _width(widths.values())
        wishes = {column: max(map(_widest, self._cells(column))) - width for column, width in widths.items()}
        for left, column in zip(range(len(columns), 0, -1), sorted(columns, key=wishes.__getitem__), strict=True):
            given = max(0, min(wishes[column], spare // left))
            widths[column] += given
            spare -= given
        return list(widths.values())

    def _least(self, column: int) -> int:
        """The narrowest that breaks no word of the header and no number."""
        name, (header, *cells) = self.head[column], self._cells(column)
        measure = _longest_word if name in self._words else _widest
        least = max(map(measure, cells), default=0)
        return max(_longest_word(header), min(least, FOLDED) if name in self._folds else least)

    def _cells(self, column: int) -> list[str]:
        return [self.head[column], *(cells[column].plain for cells in self.rows)]


def _width(widths: Iterable[int]) -> int:
    """Of a table."""
    return AROUND + sum(width + BETWEEN for width in widths)


def _widest(text: str) -> int:
    return max(map(cell_len, text.splitlines()), default=0)


def _longest_word(text: str) -> int:
    return max(map(cell_len, text.split()), default=0)
