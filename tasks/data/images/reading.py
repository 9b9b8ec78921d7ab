"""Opens the images of a run's data, each once, and writes those that differ into one file."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from grpo_core.data.images import FILE, ImageError, layout, open_image, size_of
from grpo_core.run_files import is_file

GROUP = 2**22  # bytes of the images that are read together
LARGEST = 2**28  # bytes of a file
ADDRESS = re.compile(r"(?i)[a-z][a-z0-9+.-]*://")
SHOWN = 60  # characters of a path in a finding


class ImageWriter:
    """Numbers images by their pixels, and writes each of them once."""

    def __init__(self, path: Path, processor: Any, max_pixels: int):
        self.file, self.processor, self.max_pixels = path, processor, max_pixels
        self.known: dict[str | bytes, int | ImageError] = {}  # by path, or digest of bytes
        self.numbers: dict[bytes, int] = {}  # by digest of pixels
        self.rows: list[dict[str, Any]] = []  # not written yet
        self.tokens: list[int] = []  # of each image
        self.largest = (0, 0)
        self.bytes = self.waiting = 0
        self.writer = pq.ParquetWriter(path, FILE, compression="none", use_dictionary=False)

    def number(self, source: Mapping[str, Any], folder: Path, within: bool) -> int:
        """The number of an image. `folder`: where paths begin; `within`: they may not leave it. Raises ImageError if
        the image cannot be used."""
        held = _held(source, folder, within)
        key = str(held) if isinstance(held, Path) else hashlib.blake2b(held, digest_size=16).digest()
        if key not in self.known:
            try:
                self.known[key] = self._opened(_read(held) if isinstance(held, Path) else held)
            except ImageError as error:
                self.known[key] = error
        if isinstance(found := self.known[key], ImageError):
            raise found
        return found

    def close(self) -> dict[str, Any]:
        """Finish the file. Returns its figures."""
        self._write()
        self.writer.close()
        counts = self.tokens or [0]
        tokens = {"min": min(counts), "mean": float(np.mean(counts)), "max": max(counts)}
        return {"count": len(self.tokens), "bytes": self.bytes, "largest": [*self.largest], "tokens": tokens}

    def _opened(self, data: bytes) -> int:
        image = open_image(data, self.max_pixels)
        width, height = image.size
        laid_out = layout(self.processor, height, width)
        digest = hashlib.blake2b(image.tobytes(), digest_size=16, key=b"%dx%d" % image.size).digest()
        if digest in self.numbers:
            return self.numbers[digest]
        number = self.numbers[digest] = len(self.tokens)
        self.largest = max(self.largest, (width, height), key=lambda size: size[0] * size[1])
        self.tokens.append(laid_out.tokens)
        self.bytes += len(data)
        self.waiting += len(data)
        sizes = {"height": height, "width": width, "tokens": laid_out.tokens, "grid": laid_out.grid}
        self.rows.append({"image": data, **sizes})
        if self.waiting >= GROUP:
            self._write()
        return number

    def _write(self) -> None:
        if self.rows:
            self.writer.write_table(pa.Table.from_pylist(self.rows, FILE))
        self.rows, self.waiting = [], 0


def count_tokens(frame: pl.DataFrame, images: pl.Expr, processor: Any, folder: Path, within: bool) -> list[int]:
    """Tokens of the images of each row, by the headers of their files; those that cannot be opened have none."""

    def tokens(source: Mapping[str, Any]) -> int:
        try:
            held = _held(source, folder, within)
            return layout(processor, *size_of(_read(held) if isinstance(held, Path) else held)).tokens
        except ImageError:
            return 0

    return [sum(map(tokens, given)) for given in frame.select(images).to_series()]


def _held(source: Mapping[str, Any], folder: Path, within: bool) -> bytes | Path:
    """The bytes of an image, or the file that has them. `folder`, `within`: see `ImageWriter.number`."""
    data, path = source["bytes"], source["path"]
    if data is None and path and path.startswith("data:"):
        data = _decoded(path)
    if data is not None:
        return data
    if not path:
        raise ImageError("neither bytes nor a path")
    if ADDRESS.match(path):
        raise ImageError(f"{path[:SHOWN]!r} is an address; download the images, and give paths or bytes")
    place = folder / path
    if within and not place.resolve().is_relative_to(folder.resolve()):
        raise ImageError(f"{path[:SHOWN]!r} is not in the data set; a data set of the hub holds its images itself")
    return place


def _read(path: Path) -> bytes:
    if not is_file(path):  # nor a pipe, which would be waited for
        raise ImageError(f"{str(path)[-SHOWN:]!r}: no such file")
    try:
        if (size := path.stat().st_size) > LARGEST:
            raise ImageError(f"{size:,} bytes, and a file may have {LARGEST:,}")
        return path.read_bytes()
    except OSError as error:
        raise ImageError(f"{str(path)[-SHOWN:]!r}: {error.strerror}") from error


def _decoded(address: str) -> bytes:
    """The bytes of a data: URL."""
    form, _, text = address.partition(",")
    if not form.endswith(";base64"):
        raise ImageError(f"{address[:SHOWN]!r} is no data: URL in base64")
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"base64 that cannot be decoded: {error}") from error
