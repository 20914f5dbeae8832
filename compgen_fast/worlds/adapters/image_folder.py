"""Any folder of images, with labels or without: the layout for data of your own.

Labels come from a csv table, which has a header line and one line for each image, and names the file by its path from
the folder. Column types are inferred: where every cell reads as a number the factor is a number between the smallest
and the largest; otherwise it is a category whose values are the distinct cells, sorted. Without a table, folders that
hold all the images between them are classes, as in torchvision's ImageFolder: the one factor is called ``class``. What
has neither has no factors.
"""

from collections.abc import Sequence
from os.path import abspath
from pathlib import Path, PurePosixPath

from compgen_fast.worlds.adapters.columns import Columns, category, infer
from compgen_fast.worlds.adapters.folder_source import FolderSource
from compgen_fast.worlds.adapters.layout import IMAGES, Layout, files_below
from compgen_fast.worlds.source import Factor

LAYOUT = Layout(
    "an image folder",
    """
    FOLDER/
      …/anything.png      images (png, jpg, webp, bmp, tiff), in folders or not
      factors.csv         if there are labels: a header with `filename` and the factors, then a line for each image
      CLASS/…             or, without a table, a folder for each class
    """,
)


def image_folder(
    folder: str | Path,
    *,
    resolution: int = 64,
    table: str | None = None,
    filename: str | None = None,
    columns: Sequence[str] | None = None,
    categories: Sequence[str] | None = None,
    unlisted: bool | None = None,
) -> FolderSource:
    """Open a folder of images.

    Args:
        folder: holds, at any depth, the images, and the table if there is one.
        resolution: side of the square images given out.
        table: the csv file's name; the only csv file there when None.
        filename: the column that names the image; ``filename`` when None.
        columns: which columns are factors; all but the file name when None.
        categories: columns of numbers that are names all the same, such as class labels.
        unlisted: whether images that the table does not name are left out rather than refused.
    """
    root = LAYOUT.folder(folder)
    name = Path(abspath(root)).name  # of `.` too
    path = LAYOUT.first(root, table) if table else _only_table(root)
    if path is None:
        _refuse_without_table(root, filename=filename, columns=columns, categories=categories, unlisted=unlisted)
        images = sorted(files_below(root))
        if not images:
            raise LAYOUT.odd(root, f"no image was found ({', '.join(IMAGES)})")
        return FolderSource(name, root, *_classes(images), tuple(images), resolution)
    filename, categories = filename or "filename", categories or ()
    text = LAYOUT.rows(path, None if columns is None else [filename, *columns])
    for column in (filename, *categories):
        if column not in text:
            raise LAYOUT.odd(path, f"there is no column {column!r} among {', '.join(text)}")
    images = [PurePosixPath(image).as_posix() for image in text.pop(filename)]  # ./a.png is a.png
    LAYOUT.match(root, files_below(root), path, images, bool(unlisted))
    return FolderSource(name, root, *infer(LAYOUT, path, text, categories), tuple(images), resolution)


def _only_table(root: Path) -> Path | None:
    tables = sorted(root.glob("*.csv"))
    if len(tables) > 1:
        found = ", ".join(path.name for path in tables)
        raise LAYOUT.odd(root, f"one csv file at most was looked for and {found} found (name it: table=...)")
    return tables[0] if tables else None


def _refuse_without_table(root: Path, **options: object) -> None:
    for option, value in options.items():
        if value is not None:
            raise ValueError(f"{root}: {option} is about a csv file, and there is none; leave it out")


def _classes(images: Sequence[str]) -> tuple[tuple[Factor, ...], Columns]:
    """The factor ``class`` and its column where every image is in one of several folders; nothing otherwise."""
    homes = [PurePosixPath(image).parts[0] if "/" in image else "" for image in images]
    classes = tuple(sorted(set(homes)))
    if "" in classes or len(classes) < 2:
        return (), {}
    factor, column = category("class", classes, homes)
    return (factor,), {factor.name: column}
