"""Which images a folder holds and which labels they have, from names and `labels.csv` alone."""

import csv
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quantsieve.data.conform import nearest
from quantsieve.errors import InputError

IMAGE_SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".pbm", ".pnm", ".gif", ".tif", ".tiff")
)
LABELS_FILE = "labels.csv"


@dataclass(frozen=True, slots=True)
class Listed:
    """One image: where it lies, its name relative to the folder, its label if it has one."""

    path: Path
    name: str
    label: int | None


@dataclass(frozen=True, slots=True)
class Listing:
    """The images in a fixed order; the names of the classes if they are known."""

    images: tuple[Listed, ...]
    class_names: tuple[str, ...] | None
    notes: tuple[str, ...]


def list_images(folder: Path, class_names: Sequence[str] | None = None) -> Listing:
    """The images of a folder in one of the three layouts: sorted by name, or in the order of `labels.csv`.

    Raises InputError for an empty folder, a mix of layouts, unknown class folders and bad rows of
    `labels.csv`.
    """
    try:
        images = _images_under(folder)
        if not images:
            raise InputError(
                f"images ({', '.join(sorted(IMAGE_SUFFIXES))}) in {folder.name}", "none", "Check the path."
            )
        if (folder / LABELS_FILE).is_file():
            return _from_csv(folder, images, class_names)
    except OSError as error:
        raise InputError("a folder that can be read", f"{folder} ({error.strerror})", "Check its rights.") from error
    inside = [path for path in images if path.parent != folder]
    if not inside or {path.relative_to(folder).parts[0] for path in images} == {"images"}:
        names = tuple(class_names) if class_names else None
        return Listing(tuple(Listed(path, _name(path, folder), None) for path in images), names, ())
    if len(inside) < len(images):
        loose = next(path for path in images if path.parent == folder)
        raise InputError(
            f"class folders only, or images only, in {folder.name}",
            f"both ({loose.name} beside {_name(inside[0], folder)})",
            "Move the loose images, or write a labels.csv.",
        )
    return _from_class_folders(folder, images, class_names)


def _images_under(folder: Path) -> list[Path]:
    """Sorted by relative name; hidden files and what archives and notebooks leave behind are skipped."""
    found = []
    for path in folder.rglob("*"):
        parts = path.relative_to(folder).parts
        is_hidden = any(part.startswith((".", "__")) for part in parts)
        if path.suffix.lower() in IMAGE_SUFFIXES and not is_hidden and path.is_file():
            found.append(path)
    return sorted(found, key=lambda path: path.relative_to(folder).parts)


def _name(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def _from_class_folders(folder: Path, images: Sequence[Path], class_names: Sequence[str] | None) -> Listing:
    # An empty class folder keeps its number: the model has that class.
    folders = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith((".", "__")))
    notes: tuple[str, ...] = ()
    if class_names is None:
        names = tuple(folders)
        if all(name.isdigit() for name in names) and [int(name) for name in names] != list(range(len(names))):
            notes = (
                "class folders are named by numbers and were numbered in the order of text, not by value "
                f"({', '.join(names[:4])}, ...); give class_names if the model counts otherwise",
            )
    else:
        names = tuple(class_names)
        _check_class_folders(folders, names)
    labels = {name: names.index(name) for name in folders}
    listed = [Listed(path, _name(path, folder), labels[path.relative_to(folder).parts[0]]) for path in images]
    used = {image.label for image in listed}
    empty = [name for name in folders if labels[name] not in used]
    if empty:
        notes += (f"class folders without images: {', '.join(empty)}",)
    return Listing(tuple(listed), names, notes)


def _check_class_folders(folders: Sequence[str], class_names: Sequence[str]) -> None:
    counts = Counter(class_names)
    for name in folders:
        if counts[name] == 0:
            raise InputError(
                f"class folders named as in the {len(class_names)} class names",
                f"'{name}'",
                f"Rename the folder or correct the names.{nearest(name, class_names)}",
            )
        if counts[name] > 1:
            raise InputError(
                f"one class named '{name}'",
                f"{counts[name]}",
                "Use a labels.csv with numbers, or distinct names.",
            )


def _from_csv(folder: Path, images: Sequence[Path], class_names: Sequence[str] | None) -> Listing:
    listed: dict[Path, Listed] = {}
    for line, file, label_text in _rows(folder / LABELS_FILE):
        path = _find(folder, file, line)
        if path in listed:
            raise InputError("one row an image", f"'{file}' again in line {line} of {LABELS_FILE}", "Drop one.")
        listed[path] = Listed(path, file, _label(label_text, line, class_names))
    unlabelled = [path for path in images if path not in listed]
    if unlabelled:
        more = f" and {len(unlabelled) - 1} more" if len(unlabelled) > 1 else ""
        raise InputError(
            f"a row in {LABELS_FILE} for every image",
            f"none for {_name(unlabelled[0], folder)}{more}",
            "Add the rows, or move the images out.",
        )
    return Listing(tuple(listed.values()), tuple(class_names) if class_names else None, ())


def _rows(path: Path) -> list[tuple[int, str, str]]:
    """(line number, file, label) of each row. Raises InputError when it is no such table."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.DictReader(stream, skipinitialspace=True)
            columns = [name.strip() for name in reader.fieldnames or ()]
            if "file" not in columns or "label" not in columns:
                raise InputError(
                    f"the columns file,label in {LABELS_FILE}",
                    ",".join(columns) or "an empty file",
                    "Correct its first line, or remove the file to use the images without labels.",
                )
            reader.fieldnames = columns
            return [(reader.line_num, row["file"] or "", row["label"] or "") for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{LABELS_FILE} as comma-separated UTF-8 text", f"{error}", "Write it anew.") from error


def _find(folder: Path, file: str, line: int) -> Path:
    for path in (folder / file, folder / "images" / file):
        if file and path.is_file():
            return path
    raise InputError(
        f"an image for each row of {LABELS_FILE}",
        f"no file '{file}' (line {line}) in {folder.name} or {folder.name}/images",
        "Correct or drop the row.",
    )


def _label(text: str, line: int, class_names: Sequence[str] | None) -> int:
    try:
        label = int(text)
    except ValueError:
        label = -1
    limit = len(class_names) if class_names else None
    if label < 0 or (limit is not None and label >= limit):
        wanted = "a class number from 0" + (f" to {limit - 1}" if limit is not None else "")
        raise InputError(wanted, f"'{text}' in line {line} of {LABELS_FILE}", "Correct the label.")
    return label
