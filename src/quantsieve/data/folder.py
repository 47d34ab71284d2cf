"""Samples in a folder of images, for models with one image input.

Three layouts: class folders (label = number of the folder in sorted order, or in `class_names`), images with
a `labels.csv` (header `file,label`; files relative to the folder or to its subfolder `images`), and images
without labels. Every image is decoded once at opening, so that a broken file is reported before the work
begins.
"""

import io
import struct
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from quantsieve.data._listing import Listed, list_images
from quantsieve.data.preprocess import Preprocess
from quantsieve.data.samples import Feed, InputSpec, check_index, content_digest, read_only
from quantsieve.errors import InputError

# What Pillow's decoders raise on damaged files, by format; UnidentifiedImageError is an OSError.
_UNREADABLE = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
_NAMED = 3  # bad files that a message names before it only counts


@dataclass(frozen=True, slots=True)
class _Readable:
    listed: Listed
    digest: str
    height: int
    width: int


class FolderSamples:
    """Images on disk, decoded and preprocessed when they are fed."""

    def __init__(
        self,
        folder: Path,
        inputs: Sequence[InputSpec],
        *,
        preprocess: Preprocess | None = None,
        skip_bad: bool = False,
        class_names: Sequence[str] | None = None,
    ):
        """class_names: name of each class, index = label. skip_bad: leave out unreadable images, with a note.

        Raises InputError for an empty folder, bad labels, unreadable images, and images that do not end in
        the input's shape.
        """
        if len(inputs) != 1:
            names = ", ".join(f"'{spec.name}'" for spec in inputs)
            raise InputError("a model with one input for a folder of images", f"inputs {names}", "Use a .npz file.")
        self.name = folder.name
        self._spec = inputs[0]
        asked = preprocess or Preprocess()
        self._preprocess, guesses = asked.resolved(self._spec)
        listing = list_images(folder, class_names)
        self.class_names = listing.class_names
        self._images, skipped = _read_all(listing.images, folder, skip_bad)
        for image in self._images:
            self._preprocess.check((image.height, image.width), self._spec, image.listed.name)
        labels = [image.listed.label for image in self._images if image.listed.label is not None]
        self.labels = read_only(np.array(labels, dtype=np.int64)) if labels else None
        self._digest: str | None = None
        self.notes: tuple[str, ...] = (
            *listing.notes,
            *skipped,
            *guesses,
            *(_resize_note(self._images, self._preprocess) if asked.resize is None else ()),
            *_same_images(self._images),
        )

    def __len__(self) -> int:
        return len(self._images)

    @property
    def preprocess(self) -> Preprocess:
        """The preprocessing in use, with what the model settled filled in."""
        return self._preprocess

    def feed(self, index: int) -> Feed:
        check_index(index, len(self._images))
        listed = self._images[index].listed
        try:
            with Image.open(listed.path) as image:
                image.load()
        except _UNREADABLE as error:
            raise InputError(
                "an image that was readable before",
                f"{listed.name} ({error})",
                "Leave the files as they are in a run.",
            ) from error
        return {self._spec.name: self._preprocess.apply(image, self._spec)}

    def fingerprint(self) -> str:
        if self._digest is not None:
            return self._digest
        parts: list[str | np.ndarray] = ["images", str(self._spec.dtype), str(self._spec.shape)]
        parts += [self._preprocess.to_toml(), *(image.digest for image in self._images)]
        parts += ["no labels"] if self.labels is None else ["labels", self.labels]
        self._digest = content_digest(parts)
        return self._digest


def _read_all(images: Sequence[Listed], folder: Path, skip_bad: bool) -> tuple[list[_Readable], list[str]]:
    readable, bad = [], []
    for listed in images:
        try:
            readable.append(_read(listed))
        except _UNREADABLE as error:
            # Pillow's own words for this name an object in memory.
            unknown = isinstance(error, UnidentifiedImageError)
            reason = "not an image that can be decoded" if unknown else str(error) or type(error).__name__
            bad.append((listed.name, reason))
    if bad and not skip_bad:
        name, reason = bad[0]
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise InputError(
            f"readable images in {folder.name}",
            f"{name}{more} ({reason})",
            "Remove or repair, or pass --skip-bad.",
        )
    if not readable:
        raise InputError(f"readable images in {folder.name}", f"{len(bad)} unreadable ones", "Check the files.")
    if not bad:
        return readable, []
    shown = ", ".join(name for name, _ in bad[:_NAMED]) + (", ..." if len(bad) > _NAMED else "")
    return readable, [f"{len(bad)} unreadable image{'s' if len(bad) > 1 else ''} skipped: {shown}"]


def _read(listed: Listed) -> _Readable:
    data = listed.path.read_bytes()
    with Image.open(io.BytesIO(data)) as image:
        width, height = image.size
        if image.mode == "F":
            raise ValueError("pixels are floats of unknown range")
        # JPEG only: decoding at an eighth of the size reads the whole stream, and is several times faster.
        image.draft("RGB", (1, 1))
        image.load()
    return _Readable(listed, sha256(data).hexdigest(), height, width)


def _resize_note(images: Sequence[_Readable], preprocess: Preprocess) -> list[str]:
    """A note when nobody asked for resizing and the model's fixed size made it happen."""
    size = preprocess.resize
    if not isinstance(size, tuple):
        return []
    count = sum((image.height, image.width) != size for image in images)
    note = f"{count} of {len(images)} images resized to {size[0]}x{size[1]}, the size that the model takes"
    return [note] if count else []


def _same_images(images: Sequence[_Readable]) -> list[str]:
    """A note when files are equal: one image in two parts of a split makes the final figures look better."""
    repeated = sum(count - 1 for count in Counter(image.digest for image in images).values())
    return [f"{repeated} of {len(images)} images equal another one byte for byte"] if repeated else []
