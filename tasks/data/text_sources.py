"""Reads JSON lines, JSON and CSV, plain or compressed by gzip, as Arrow columns. A fault is reported with the first row
that has it.

JSON is read by polars and checked by pyarrow, one block of lines at a time (a JSON list is in memory as a whole). If
either refuses a block, the file is searched row by row for the fault, which is then described in plain words.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import itertools
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

from tasks.data.images.columns import all_in_parts
from tasks.data.rows import SLICE_ROWS

GZIP = b"\x1f\x8b"
BLOCK = 2**24  # bytes that pyarrow reads at a time; enlarged for longer lines
LONGEST_INTEGER = 2**127  # polars' widest
BLANKS = re.compile(r"[ \t\n\r]*")
SURROGATE = re.compile("[\ud800-\udfff]")
DEEPEST = 100  # nested objects and lists; parsers recurse, and crash the process on some thousands
NESTING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[{\[]|[}\]]', re.DOTALL)
LARGEST = 2**33  # bytes of a file after decompression
LONGEST_LINE = 2**26  # bytes, or characters of CSV; parsers take several times as much memory
LARGEST_LIST = 2**28  # bytes of a list in JSON, which takes about five times as many in memory
CHUNK = 2**25  # bytes of text read at a time
SHOWN = 40  # characters around a fault
OTHER_SEPARATORS = (";", "\t", "|")
csv.field_size_limit(LONGEST_LINE)  # the contract decides whether a prompt is too long


class Fault(ValueError):
    """Raised for a fault in a file; the message describes it and names the first row that has it."""


class NotTextFault(Fault):
    """Raised for bytes that are not UTF-8."""


def read_text(path: Path, kind: str) -> Iterator[pl.DataFrame]:
    """Read the rows of a file of kind .jsonl, .json or .csv, about CHUNK bytes of text at a time. Frames may differ in
    their columns and types.

    Raises Fault for faults that have a description, and ValueError or polars' errors for others: see `find_fault`.
    """
    try:
        yield from _read_csv(_content(path)) if kind == ".csv" else _read_json(path, kind)
    except MemoryError as error:
        raise Fault("it does not fit into this machine's memory; write it as .parquet, or with fewer rows") from error


def find_fault(path: Path, kind: str) -> str:
    """Describe the fault of a file of JSON rows, with the first row that has it; "" if none is found."""
    seen: dict[str, tuple[str, str]] = {}  # path of a value → its kind, and the first place with that kind
    row, line = 0, 1
    for block in _json_blocks(path, kind):
        for place, text in _places(block, kind, row, line):
            if problem := _problem_of_row(text, place, seen):
                return f"{place}: {problem}"
            row += 1
        line += block.count(b"\n")
    return ""


def _read_json(path: Path, kind: str) -> Iterator[pl.DataFrame]:
    """Read JSON; refuse columns with values of several kinds in one block."""
    row, line = 0, 1
    for block in _json_blocks(path, kind):
        if not block.isspace():
            _refuse_deep_rows(block, kind, row, line)
            try:
                _refuse_mixed_columns(block)
                alike = block
            except ValueError:
                _refuse_mixed_columns(alike := _in_parts(block))
            frame = pl.read_ndjson(io.BytesIO(alike), infer_schema_length=None)
            yield frame
            row += frame.height
        line += block.count(b"\n")


def _places(block: bytes, kind: str, row: int, line: int) -> Iterator[tuple[str, bytes]]:
    """Yield (place in words, text) of each row that is not blank. `row`, `line`: numbers of the block's first row and
    line."""
    for number, text in enumerate(io.BytesIO(block), line):
        if text.strip():
            yield f"row {row} (line {number})" if kind == ".jsonl" else f"row {row}", text
            row += 1


def _content(path: Path) -> Iterator[bytes]:
    """Yield the file's bytes, decompressed and without a byte order mark, CHUNK at a time."""
    with path.open("rb") as file:
        compressed = file.read(len(GZIP)) == GZIP
    chunks = _decompressed(path) if compressed else _chunks(path)
    yield next(chunks, b"").removeprefix(codecs.BOM_UTF8)
    yield from chunks


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            yield chunk


def _decompressed(path: Path) -> Iterator[bytes]:
    size = 0
    try:
        with gzip.open(path) as file:
            while chunk := file.read(CHUNK):
                size += len(chunk)
                if size > LARGEST:
                    raise Fault(
                        f"decompressed it has more than {LARGEST:,} bytes, the limit for a file compressed "
                        "by gzip; write it as .parquet"
                    )
                yield chunk
    except (OSError, EOFError, zlib.error) as error:
        raise Fault(f"it is compressed by gzip, but damaged: {error}") from error


def _json_blocks(path: Path, kind: str) -> Iterator[bytes]:
    """Yield blocks of about CHUNK bytes, in which each line is a row or blank."""
    content = _content(path)
    if kind == ".json":
        whole = _whole(content)
        rows = _cut_list(whole) if whole.strip() else b""
        content = (rows[start : start + CHUNK] for start in range(0, len(rows), CHUNK))
    has_rows, line, number = False, [b""], 1
    for chunk in content:
        end = chunk.rfind(b"\n") + 1
        if end:
            block = b"".join([*line, chunk[:end]])
            has_rows |= not block.isspace()
            yield block
            number, line = number + block.count(b"\n"), []
        line.append(chunk[end:])
        if sum(map(len, line)) > LONGEST_LINE:
            raise Fault(_too_long(f"line {number}" if kind == ".jsonl" else f"row {number - 1}"))
    if last := b"".join(line):
        has_rows |= not last.isspace()
        yield last
    if not has_rows:
        raise Fault("it has no rows")


def _too_long(place: str) -> str:
    return f"{place} has more than {LONGEST_LINE:,} characters, the limit; leave it out, or write the file as .parquet"


def _whole(content: Iterator[bytes]) -> bytes:
    whole = bytearray()
    for chunk in content:
        whole += chunk
        if len(whole) > LARGEST_LIST:
            raise Fault(f"it has more than {LARGEST_LIST:,} bytes, the limit for a list; write it as .jsonl")
    return bytes(whole)


def _cut_list(content: bytes) -> bytes:
    """Put the elements of a JSON list, unchanged, each on its own line."""
    text = content.decode(errors="surrogateescape")  # bytes that are not UTF-8 are found row by row
    decoder = json.JSONDecoder(parse_int=len, parse_float=len)
    rows: list[str] = []
    before, at = "[", _after_blanks(text, 0)
    while text[at : at + 1] == before:
        at = _after_blanks(text, at + 1)
        if not rows and text[at : at + 1] == "]":
            break
        try:
            _, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise Fault(f"row {len(rows)}: {_syntax(error)}") from error
        except RecursionError as error:
            raise Fault(f"row {len(rows)}: nested too deeply") from error
        rows.append(text[at:end].replace("\n", " ").replace("\r", " "))
        before, at = ",", _after_blanks(text, end)
    if not rows and text[at : at + 1] != "]":
        raise Fault('it is not a list of objects, [{"prompt": …}, …]; for an object on each line use the ending .jsonl')
    if text[at : at + 1] != "]" or _after_blanks(text, at + 1) < len(text):
        found = repr(text[at : at + SHOWN]) if at < len(text) else "the end of the file"
        raise Fault(f"after row {len(rows) - 1} comes {found}, not ',' and a further row, or ']' and the end")
    return "\n".join(rows).encode(errors="surrogateescape")


def _after_blanks(text: str, at: int) -> int:
    found = BLANKS.match(text, at)
    assert found
    return found.end()


def _refuse_deep_rows(block: bytes, kind: str, row: int, line: int) -> None:
    for place, text in _places(block, kind, row, line):
        if text.count(b"{") + text.count(b"[") > DEEPEST and _depth(text) > DEEPEST:
            raise Fault(f"{place}: nested too deeply: more than {DEEPEST} objects and lists inside each other")


def _depth(text: bytes) -> int:
    """Largest nesting depth of objects and lists; brackets in strings do not count."""
    depth = deepest = 0
    for found in NESTING.finditer(text):
        opened = found[0]
        depth += (opened in b"{[") - (opened in b"}]")
        deepest = max(deepest, depth)
    return deepest


def _refuse_mixed_columns(block: bytes) -> None:
    """Raises ValueError if a column has values of several kinds: polars would turn all of them into text."""
    from pyarrow import json as arrow_json  # takes half a second to import, which planning does not need

    longest = max(map(len, io.BytesIO(block)))
    arrow_json.read_json(io.BytesIO(block), arrow_json.ReadOptions(block_size=max(BLOCK, longest + 1)))


def _in_parts(block: bytes) -> bytes:
    """The rows, with the texts of messages as content parts if the content of other messages is parts."""
    try:
        rows = [json.loads(text, object_pairs_hook=_different_names) for text in block.split(b"\n") if text.strip()]
    except (ValueError, RecursionError):  # described by `find_fault`
        return block
    return "\n".join(map(json.dumps, rows)).encode() if all_in_parts(rows) else block


def _problem_of_row(text: bytes, place: str, seen: dict[str, tuple[str, str]]) -> str:
    try:
        row = json.loads(
            text.decode().rstrip(),
            object_pairs_hook=_different_names,
            parse_int=_integer,
            parse_float=_finite,
            parse_constant=_refuse_constant,
        )
        if not isinstance(row, dict):
            return f'it is {_kind(row)}, not an object with the columns as names, {{"prompt": …}}'
        for name, value in _values(row, ""):
            kind = _kind(value)
            first, where = seen.setdefault(name, (kind, place))
            if kind != first:
                return f"column {name!r} has {kind} here but {first} in {where}; a column must hold values of one kind"
    except UnicodeDecodeError as error:
        return f"byte {error.start + 1} of it is not UTF-8: {text[error.start : error.start + 1]!r}"
    except json.JSONDecodeError as error:
        return _syntax(error)
    except Fault as fault:
        return str(fault)
    return ""


def _syntax(error: json.JSONDecodeError) -> str:
    """Describe an error of Python's parser in plain words, with the text at its place."""
    found = error.doc[error.pos : error.pos + SHOWN]
    ends = found[:1] in ("]", "}") or error.msg.startswith("Expecting property")
    if error.msg == "Extra data":
        said = "nothing may follow the object: one object on each line, without commas between"
    elif error.msg.startswith("Illegal trailing comma"):  # Python 3.13's, at the comma
        said, found = "something has to follow a comma", error.doc[error.pos + 1 :].lstrip()[:SHOWN]
    elif ends and error.doc[: error.pos].rstrip().endswith(","):
        said = "something has to follow a comma"
    else:
        said = (error.msg[0].lower() + error.msg[1:]).removesuffix(" starting at")
    return f"not JSON: {said}; found {found!r}" if found else f"not JSON: {said}; it ends there"


def _values(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield each value inside a row that is not null, with its path, such as prompt[].content."""
    if isinstance(value, str) and (lone := SURROGATE.search(value)):
        raise Fault(f"column {name!r} has half a character: \\u{ord(lone[0]):x} without its pair")
    if value is not None and name:
        yield name, value
    if isinstance(value, dict):
        for key, inside in value.items():
            yield from _values(inside, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for inside in value:
            yield from _values(inside, f"{name}[]")


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    kinds = {str: "text", int: "a number", float: "a number", list: "a list", dict: "an object", type(None): "null"}
    return kinds[type(value)]


def _different_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise Fault(f"the name {name!r} is given twice")
        found[name] = value
    return found


def _integer(digits: str) -> int:
    if len(digits) > len(str(LONGEST_INTEGER)) or not -LONGEST_INTEGER <= int(digits) < LONGEST_INTEGER:
        raise Fault(f"an integer of {len(digits.lstrip('-'))} digits is beyond what a column holds; write it as text")
    return int(digits)


def _finite(number: str) -> float:
    if abs(value := float(number)) == float("inf"):
        raise Fault(f"{number} is beyond any number that a column holds; write it as text")
    return value


def _refuse_constant(name: str) -> float:
    raise Fault(f"{name} is not JSON; write null for a missing value")


def _read_csv(content: Iterator[bytes]) -> Iterator[pl.DataFrame]:
    """Read all columns as text: "007" keeps its zeros, and "NA" is an answer. Only an empty field counts as missing."""
    lines = csv.reader(_text_lines(content), strict=True)
    header: list[str] = []
    rows: list[list[str | None]] = []
    done = size = 0  # rows before `rows`, and characters of these
    first = 1  # line on which a row begins; a row with line breaks in its fields ends on a later one
    try:
        for fields in lines:
            if fields and not header:
                header = _checked_header(fields)
            elif len(fields) > len(header):
                raise Fault(
                    f"{len(fields)} fields, but the header has {len(header)}: put a field with commas in quotes"
                )
            elif fields:
                rows.append([field or None for field in fields] + [None] * (len(header) - len(fields)))
                size += sum(map(len, fields))
            first = lines.line_num + 1
            if size >= CHUNK or len(rows) >= SLICE_ROWS:
                yield _csv_frame(header, rows)
                done, size, rows = done + len(rows), 0, []
    except (csv.Error, Fault) as error:
        said = {
            "unexpected end of data": "a quote is opened and never closed",
            f"field larger than field limit ({LONGEST_LINE})": _too_long("a field"),
            "',' expected after '\"'": 'no comma follows a closing quote; write a quote inside quotes as ""',
        }.get(str(error), str(error))
        if isinstance(error, NotTextFault):
            raise
        raise Fault(f"row {done + len(rows)} (line {first}): {said}" if header else f"header: {said}") from error
    if not header:
        raise Fault("it has no rows")
    if rows or not done:
        yield _csv_frame(header, rows)


def _csv_frame(header: list[str], rows: list[list[str | None]]) -> pl.DataFrame:
    columns = zip(*rows, strict=True) if rows else [()] * len(header)
    return pl.DataFrame(dict(zip(header, columns, strict=True)), schema=dict.fromkeys(header, pl.String))


def _text_lines(content: Iterator[bytes]) -> Iterator[str]:
    decoder, before, line = codecs.getincrementaldecoder("utf-8")(), 0, ""  # before: line ends of earlier chunks
    for chunk in itertools.chain(content, [b""]):
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            number = before + error.object.count(b"\n", 0, error.start) + 1
            raise NotTextFault(f"line {number}: not UTF-8: {error.object[error.start : error.start + 1]!r}") from error
        before += chunk.count(b"\n")
        # The last line may continue, or end with \r and \n.
        *lines, line = [*io.StringIO(line + text, newline="")] or [""]
        if len(line) > LONGEST_LINE:
            raise Fault(_too_long("it"))
        yield from lines
    if line:
        yield line


def _checked_header(fields: list[str]) -> list[str]:
    other = [separator for separator in OTHER_SEPARATORS if len(fields) == 1 and separator in fields[0]]
    if other:
        raise Fault(f"{fields[0]!r} is one column: fields are separated by commas, not by {other[0]!r}")
    if twice := [name for place, name in enumerate(fields) if name in fields[:place]]:
        raise Fault(f"the column {twice[0]!r} appears twice")
    return fields
