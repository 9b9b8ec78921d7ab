"""Commands of a shell script: words and environment of each, with the variables that the script itself sets.

Nothing is run. Understood are quotes (over several lines too), comments, continued lines, redirections, here-documents,
assignments, arrays and `$NAME`, `${NAME}`, `${NAME:-default}`, `${NAME[@]}`; all other text is kept as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

BLANK = re.compile(r"(?:[ \t\r]|\\\r?\n)+")
PLACEHOLDER = re.compile(r"<[\w.-]+>")  # <host>: what a reader is to fill in
REDIRECTION = re.compile(r"\d*(?:<<<|<<-?|<&|<|>>|>&|>\||>|&>>|&>)")
END = re.compile(r"\n|;+|&&|\|\||[|&()]")
SUBSTITUTION = r"\$\((?>[^()]+|\((?>[^()]+|\([^()]*\))*\))*\)|`[^`]*`"
VARIABLE = r"\$\{[^}]*\}|\$\w+|\$[@*]"
SINGLE = re.compile(r"\$?'([^']*)'")
DOUBLE = re.compile(rf'"((?>\\.|{SUBSTITUTION}|[^"\\])*+)"', re.S)
BARE = re.compile(rf"{SUBSTITUTION}|{VARIABLE}|\\.?|[^\s;&|<>()'\"\\$`]+|\$", re.S)
NAMED = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::?-([^}]*))?\}|\$(\w+)")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
NAME = re.compile(r"[A-Za-z_]\w*")
LEADING = {"if", "then", "elif", "else", "while", "until", "do", "!", "time", "{", "}"}
SETS = {"export", "declare", "local", "readonly", "typeset"}
OWN_FOLDER = re.compile(r"dirname.*(BASH_SOURCE|\$\{?0)")

OPENS = {"if", "case", "for", "while", "until", "select", "{", "function"}
CLOSES = {"fi", "esac", "done", "}"}
READS = {"read", "mapfile", "readarray", "let", "getopts", "unset"}
MAX_CHARACTERS, MAX_WORDS = 1_000_000, 10_000  # of one variable

Values = dict[str, list[str]]


class ShellError(ValueError):
    """A script that ends inside a quote, or a variable that grows without bounds."""


@dataclass(frozen=True)
class Command:
    """One simple command. `environment`: variables set by the script before it, and in front of it."""

    words: list[str]
    environment: Mapping[str, str]


def commands(text: str) -> Iterator[Command]:
    """Each simple command of the script, in order; `.` stands for the script's own folder where it asks for that.

    A variable whose value depends on what happens stands as its own name: `$NAME`.
    """
    known: Values = {}
    blocks: list[tuple[str, Values, set[str]]] = []  # what ends it, values before it, names set in its branches
    before = ""
    for words, end in _statements(text, known):
        uncertain = before in ("&&", "||", "|") or end in ("|", "&")
        if end == "(":
            blocks.append((")", dict(known), set()))
        while words and (words[0] in LEADING | SETS | OPENS | CLOSES):
            first, words = words[0], words[1:]
            if first in OPENS - {"function"}:
                blocks.append(({"if": "fi", "case": "esac", "{": "}"}.get(first, "done"), dict(known), set()))
                if first in ("for", "select") and words and NAME.fullmatch(words[0]):
                    known[words[0]] = [f"${words[0]}"]
                    blocks[-1][2].add(words[0])
                if first in ("for", "select", "case"):
                    words = []
            elif blocks and first == blocks[-1][0]:
                _end_block(known, blocks)
            elif first in ("else", "elif") and blocks:
                _end_branch(known, *blocks[-1][1:])
            elif first in SETS:
                while words and words[0].startswith("-"):
                    uncertain, words = uncertain or not set(words[0]) <= set("-xrga"), words[1:]
        own: Values = {}
        while words and (match := ASSIGNMENT.match(words[0])):
            name, value = match.group(1), words[0][match.end() :]
            old = own.get(name, known.get(name, [])) if match.group(2) else []
            own[name] = _bounded(name, [(old[0] if old else "") + value, *old[1:]])
            words = words[1:]
        if words and words[0] in READS:
            for name in words[1:]:
                if match := NAME.match(name):
                    known[match.group()] = [f"${match.group()}"]
        if words:
            yield Command(words, {name: " ".join(values) for name, values in {**known, **own}.items()})
        else:
            known.update({name: [f"${name}"] for name in own} if uncertain else own)
        if end == ";;" and blocks:
            _end_branch(known, *blocks[-1][1:])
        if end == ")" and blocks and blocks[-1][0] == ")":
            _, values, _ = blocks.pop()
            known.clear()
            known.update(values)
        before = end if words or own or end != "\n" else before


def _end_branch(known: Values, values: Values, names: set[str]) -> None:
    """End one branch: the next begins with the values from before the block."""
    names |= {name for name in known.keys() | values.keys() if known.get(name) != values.get(name)}
    known.clear()
    known.update(values)


def _end_block(known: Values, blocks: list[tuple[str, Values, set[str]]]) -> None:
    """End a block: variables that one of its branches sets are unknown after it."""
    _, values, names = blocks.pop()
    _end_branch(known, values, names)
    known.update({name: [f"${name}"] for name in names})


def _bounded(name: str, values: list[str]) -> list[str]:
    if len(values) > MAX_WORDS or sum(map(len, values)) > MAX_CHARACTERS:
        raise ShellError(f"{name} grows beyond {MAX_WORDS:,} words or {MAX_CHARACTERS:,} characters")
    return values


def _statements(text: str, known: Values) -> Iterator[tuple[list[str], str]]:
    """Words between two ends (newline, `;`, `&&`, `|` and so on), expanded with the variables known by then."""
    words: list[str] = []
    heredocs: list[str] = []
    position = 0
    while position < len(text):
        if blank := BLANK.match(text, position):
            position = blank.end()
        elif text[position] == "#":
            position = _line_end(text, position)
        elif placeholder := PLACEHOLDER.match(text, position):
            words.append(placeholder.group())
            position = placeholder.end()
        elif redirection := REDIRECTION.match(text, position):
            target, position = _word(text, _skip_blanks(text, redirection.end()), {})
            if redirection.group().lstrip("0123456789") in ("<<", "<<-") and target:
                heredocs.append(target[0])
        elif end := END.match(text, position):
            position = end.end()
            if end.group() == "\n":
                for delimiter in heredocs:
                    position = _after_heredoc(text, position, delimiter)
                heredocs = []
            yield words, end.group()
            words = []
        else:
            word, position = _word(text, position, known)
            if word and ASSIGNMENT.fullmatch(word[-1]) and text[position : position + 1] == "(":
                name = word[-1].rstrip("+=")
                values, position = _array(text, position + 1, known)
                known[name] = _bounded(name, (known.get(name, []) if "+=" in word[-1] else []) + values)
            else:
                words += word
    yield words, "\n"


def _word(text: str, position: int, known: Values) -> tuple[list[str], int]:
    """The word at `position`, and where it ends. A variable may make it several words, or none."""
    parts: list[str] = []
    begun = False
    while position < len(text):
        if single := SINGLE.match(text, position):
            values, position, quoted = [single.group(1)], single.end(), True
        elif double := DOUBLE.match(text, position):
            values, position, quoted = _double_quoted(double.group(1), known), double.end(), True
        elif bare := BARE.match(text, position):
            piece, position, quoted = bare.group(), bare.end(), False
            values = [piece[1:].strip("\n")] if piece[0] == "\\" else _expanded(piece, known)
            if re.fullmatch(VARIABLE, piece) and not (parts and ASSIGNMENT.match(parts[0])):
                values = " ".join(values).split()
        elif text[position] in "'\"`":
            raise ShellError(f"a quote is never closed: {text[position : _line_end(text, position)]}")
        else:
            break
        begun = begun or quoted
        if values:
            parts = _bounded("a word", [*parts[:-1], (parts[-1] if parts else "") + values[0], *values[1:]])
    return parts if any(parts) or begun else [], position


def _double_quoted(text: str, known: Values) -> list[str]:
    """The text's words: one, unless it is an array alone."""
    if re.fullmatch(r"\$\{\w+\[[@*]\]\}|\$[@*]", text):
        return _expanded(text, known)
    pieces = re.split(rf"({SUBSTITUTION}|{VARIABLE})", re.sub(r"\\([\"\\\n])", r"\1", text))
    return ["".join(" ".join(_expanded(piece, known)) for piece in pieces)]


def _expanded(piece: str, known: Values) -> list[str]:
    """Values of a variable; `.` for the script's own folder; any other text as it stands."""
    if piece in ("$@", "$*"):  # nothing is given to the script
        return []
    if piece.startswith("$(") and OWN_FOLDER.search(piece):
        return ["."]
    if match := NAMED.fullmatch(piece):
        name, default = match.group(1) or match.group(3), match.group(2)
        values = known.get(name, [piece if default is None else default])
        return values if "[" in piece else values[:1]
    return [piece]


def _array(text: str, position: int, known: Values) -> tuple[list[str], int]:
    words: list[str] = []
    while position < len(text) and text[position] != ")":
        if text[position].isspace() or BLANK.match(text, position):
            position += 2 if text[position] == "\\" else 1
        elif text[position] == "#":
            position = _line_end(text, position)
        else:
            word, after = _word(text, position, known)
            words += word
            position = max(after, position + 1)
    return words, position + 1


def _skip_blanks(text: str, position: int) -> int:
    blank = BLANK.match(text, position)
    return blank.end() if blank else position


def _line_end(text: str, position: int) -> int:
    end = text.find("\n", position)
    return len(text) if end < 0 else end


def _after_heredoc(text: str, position: int, delimiter: str) -> int:
    """Position at which the line after a here-document begins."""
    while position < len(text):
        end = _line_end(text, position)
        line, position = text[position:end], min(end + 1, len(text))
        if line.strip() == delimiter:
            break
    return position
