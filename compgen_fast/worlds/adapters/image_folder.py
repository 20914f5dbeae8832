"""Any folder of images with a csv table of their factors: the layout for data of your own.

The table has a header line and one line for each image, which names the file by its path from the folder. Column types
are inferred: where every cell reads as a number the factor is a number between the smallest and the largest; otherwise
it is a category whose values are the distinct cells, sorted.
"""

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from compgen_fast.worlds.adapters.columns import infer
from compgen_fast.worlds.adapters.folder_source import FolderSource
from compgen_fast.worlds.adapters.layout import Layout, files_below

LAYOUT = Layout(
    "an image folder",
    """
    FOLDER/
      factors.csv         a header with `filename` and the factors, then a line for each image
      …/anything.png      images (png, jpg, webp, bmp), in folders or not
    """,
)


def image_folder(
    folder: str | Path,
    *,
    resolution: int = 64,
    table: str | None = None,
    filename: str = "filename",
    columns: Sequence[str] | None = None,
    categories: Sequence[str] = (),
    unlisted: bool = False,
) -> FolderSource:
    """Open a folder of images with a csv table.

    Args:
        folder: holds the table and, at any depth, the images.
        resolution: side of the square images given out.
        table: the csv file's name; the only csv file there when None.
        filename: the column that names the image.
        columns: which columns are factors; all but the file name when None.
        categories: columns of numbers that are names all the same, such as class labels.
        unlisted: whether images that the table does not name are left out rather than refused.
    """
    root = LAYOUT.folder(folder)
    path = LAYOUT.first(root, table) if table else _only_table(root)
    text = LAYOUT.rows(path, None if columns is None else [filename, *columns])
    if filename not in text:
        raise LAYOUT.odd(path, f"there is no column {filename!r} among {', '.join(text)}")
    for name in categories:
        if name not in text:
            raise LAYOUT.odd(path, f"there is no column {name!r} among {', '.join(text)}")
    names = [PurePosixPath(name).as_posix() for name in text.pop(filename)]  # ./a.png is a.png
    LAYOUT.match(root, files_below(root), path, names, unlisted)
    factors, values = infer(LAYOUT, path, text, categories)
    return FolderSource(root.name, root, factors, values, tuple(names), resolution)


def _only_table(root: Path) -> Path:
    tables = sorted(root.glob("*.csv"))
    if len(tables) != 1:
        found = ", ".join(path.name for path in tables) or "none"
        raise LAYOUT.odd(root, f"one csv file was looked for and {found} found (name it: table=...)")
    return tables[0]
