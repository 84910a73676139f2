"""A table on the terminal, drawn by ``rich`` if that is installed."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> None:
    """Print a table.

    Args:
        title: The line above the table.
        columns: The heads of the columns.
        rows: The cells of each row, one per column.
        right: Indices of the columns that are aligned on the right.
    """
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ModuleNotFoundError:
        _print_plain(title, columns, rows, right)
        return
    table = Table()
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # a Text: a name may look like rich's markup
    console = Console()
    console = console if console.is_terminal else Console(width=120)  # rich assumes 80 for a file
    console.print(Text(title), soft_wrap=True)
    console.print(table)


def _print_plain(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int]) -> None:
    lines = [columns, *rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    print(title)
    for line in lines:
        cells = (
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join(cells).rstrip())
