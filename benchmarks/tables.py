"""Tables of figures."""

from collections.abc import Collection

from rich.table import Table


def table(
    *headings: str,
    title: str | None = None,
    words: Collection[str] = (),
    folds: bool = False,
    collapse_padding: bool = False,
) -> Table:
    """An empty table of numbers.

    words: headings of the columns that are none, which stand left. folds: these wrap, so that figures are whole in 80
    columns.
    """
    made = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        collapse_padding=collapse_padding,
    )
    for heading in headings:
        if heading in words:
            made.add_column(heading, overflow="fold" if folds else "ellipsis", no_wrap=not folds)
        else:
            made.add_column(heading, justify="right", no_wrap=True)
    return made
