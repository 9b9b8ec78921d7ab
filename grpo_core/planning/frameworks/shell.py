"""Commands of a shell script: words and environment of each, with the variables that the script itself sets.

Nothing is run. Understood are quotes (over several lines too), comments, continued lines, redirections, here-documents,
assignments, arrays, `$NAME`, `${NAME}`, `${NAME[@]}`, `${NAME[KEY]}`, defaults and alternatives (`${NAME:-word}`, with
expansions of their own) and whole-number arithmetic (`$((2 * N))`); all other text is kept as it is. The standard
library's shlex does not tell what was in quotes, and that decides what is expanded, and into how many words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from grpo_core.planning.frameworks.arithmetic import whole_number

BLANK = re.compile(r"(?:[ \t\r]|\\\r?\n)+")
PLACEHOLDER = re.compile(r"<[\w.-]+>")  # <host>: what a reader is to fill in
REDIRECTION = re.compile(r"\d*(?:<<<|<<-?|<&|<|>>|>&|>\||>|&>>|&>)")
END = re.compile(r"\n|;+|&&|\|\||[|&()]")
SUBSTITUTION = r"\$\((?>[^()]+|\((?>[^()]+|\([^()]*\))*\))*\)|`[^`]*`"
SIMPLE = re.compile(rf"{SUBSTITUTION}|\$\w+|\$[@*]")
SINGLE = re.compile(r"\$?'([^']*)'")
BARE = re.compile(r"\\.?|[^\s;&|<>()'\"\\$`]+|\$", re.S)
PLAIN = re.compile(r"[^\\\"'$`]+")
PARAMETER = re.compile(r"\$\{(\w+)(?:\[([^]]*)\])?(?:(:?)([-+=])(.*))?\}|\$(\w+)", re.S)
ELEMENT = re.compile(r"\[([^]]*)\]=(.*)", re.S)
ARITHMETIC_COMMAND = re.compile(r"\(\(((?>[^()]+|\((?>[^()]+|\([^()]*\))*\))*)\)\)")  # ((N *= 4))
SET_IN_ARITHMETIC = re.compile(
    r"([A-Za-z_]\w*)(?:\[[^]]*\])?\s*(?:(?:[-+*/%&|^]|<<|>>)?=(?!=)|\+\+|--)|(?:\+\+|--)\s*([A-Za-z_]\w*)"
)
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
TO_ELEMENT = re.compile(r"([A-Za-z_]\w*)(\[[^]]*\]\+?=.*)", re.S)
NAME = re.compile(r"[A-Za-z_]\w*")
LEADING = {"if", "then", "elif", "else", "while", "until", "do", "!", "time", "{", "}"}
SETS = {"export", "declare", "local", "readonly", "typeset"}
OWN_FOLDER = re.compile(r"dirname.*(BASH_SOURCE|\$\{?0)")

OPENS = {"if", "case", "for", "while", "until", "select", "{", "function"}
CLOSES = {"fi", "esac", "done", "}"}
GIVEN = {*"123456789@*"}  # arguments of the script or of a function
READS = {"read", "mapfile", "readarray", "getopts", "unset", "printf"}
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
    for words, arrays, end in _statements(text, known):
        uncertain = before in ("&&", "||", "|") or end in ("|", "&")
        if end == "(":
            blocks.append((")", dict(known), set()))
        while words and (words[0] in LEADING | SETS | OPENS | CLOSES):
            first, words = words[0], words[1:]
            if first in OPENS - {"function"}:
                blocks.append(({"if": "fi", "case": "esac", "{": "}"}.get(first, "done"), dict(known), set()))
                if first == "{" and before == ")":  # of a function, whose arguments are not followed
                    known.update({name: [f"${name}"] for name in GIVEN})
                if words[:1] == ["let"]:  # for ((…))
                    continue
                if first in ("for", "select") and words and NAME.fullmatch(words[0]):
                    known[words[0]] = [f"${words[0]}"]
                    blocks[-1][2].add(words[0])
                if first in ("for", "select", "case"):
                    words = []
            elif first == "function":
                before, words = ")", words[1:]
            elif blocks and first == blocks[-1][0]:
                _end_block(known, blocks)
            elif first in ("else", "elif") and blocks:
                _end_branch(known, *blocks[-1][1:])
            elif first in SETS:
                while words and words[0].startswith("-"):
                    uncertain, words = uncertain or not set(words[0]) <= set("-xrgaA"), words[1:]
        own = arrays
        while words and (match := ASSIGNMENT.match(words[0])):
            name, value = match.group(1), words[0][match.end() :]
            old = own.get(name, known.get(name, [])) if match.group(2) else []
            own[name] = _bounded(name, [(old[0] if old else "") + value, *old[1:]])
            words = words[1:]
        if words and (match := TO_ELEMENT.fullmatch(words[0])):
            old, element = known.get(match.group(1), []), match.group(2)
            is_plain = ELEMENT.fullmatch(element) and (not old or _keyed(old))
            own[match.group(1)] = [*old, element] if is_plain else [f"${match.group(1)}"]
            words = words[1:]
        if words and words[0] in READS and (words[0] != "printf" or words[1:2] == ["-v"]):
            for name in words[1:]:
                if match := NAME.match(name):
                    known[match.group()] = [f"${match.group()}"]
        if words and words[0] in ("let", "eval"):
            _forget_set(" , ".join(words[1:]), known)
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
    names |= {name for name in known.keys() | values.keys() if known.get(name) != values.get(name)} - GIVEN
    known.clear()
    known.update(values)


def _end_block(known: Values, blocks: list[tuple[str, Values, set[str]]]) -> None:
    """End a block: variables that one of its branches sets are unknown after it."""
    _, values, names = blocks.pop()
    _end_branch(known, values, names)
    known.update({name: [f"${name}"] for name in names})


def _forget_set(arithmetic: str, known: Values) -> None:
    """Make unknown what the arithmetic sets."""
    for match in SET_IN_ARITHMETIC.finditer(arithmetic):
        name = match[1] or match[2]
        known[name] = [f"${name}"]


def _bounded(name: str, values: list[str]) -> list[str]:
    if len(values) > MAX_WORDS or sum(map(len, values)) > MAX_CHARACTERS:
        raise ShellError(f"{name} grows beyond {MAX_WORDS:,} words or {MAX_CHARACTERS:,} characters")
    return values


def _statements(text: str, known: Values) -> Iterator[tuple[list[str], Values, str]]:
    """Words between two ends (newline, `;`, `&&`, `|` and so on), expanded with the variables known by then, and the
    arrays that are assigned there."""
    words: list[str] = []
    arrays: Values = {}
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
        elif (not words or words[-1] in LEADING | {"for"}) and (match := ARITHMETIC_COMMAND.match(text, position)):
            words += ["let", match[1]]
            position = match.end()
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
            yield words, arrays, end.group()
            words, arrays = [], {}
        else:
            word, position = _word(text, position, known)
            if word and ASSIGNMENT.fullmatch(word[-1]) and text[position : position + 1] == "(":
                name = word[-1].rstrip("+=")
                values, position = _array(text, position + 1, known)
                arrays[name] = _bounded(name, (known.get(name, []) if "+=" in word[-1] else []) + values)
            else:
                words += word
                if word == ["{"] and (len(words) == 1 or words[0] == "function"):
                    yield words, arrays, "{"
                    words = []
    yield words, arrays, "\n"


def _word(text: str, position: int, known: Values) -> tuple[list[str], int]:
    """The word at `position`, and where it ends. A variable may make it several words, or none."""
    parts: list[str] = []
    begun = False
    while position < len(text):
        if single := SINGLE.match(text, position):
            values, position, quoted = [single.group(1)], single.end(), True
        elif text[position] == '"':
            end = _closing(text, position + 1, '"')
            values, position, quoted = _double_quoted(text[position + 1 : end], known), end + 1, True
        elif end := _expansion_end(text, position):
            splits = not (parts and ASSIGNMENT.match(parts[0]))
            values, position = _expanded(text[position:end], known, splits=splits), end
            quoted = splits and "" in values
        elif bare := BARE.match(text, position):
            piece, position, quoted = bare.group(), bare.end(), False
            values = [piece[1:].strip("\n")] if piece[0] == "\\" else [piece]
        elif text[position] in "'\"`":
            raise _unclosed(text, position)
        else:
            break
        begun = begun or quoted
        if values:
            parts = _bounded("a word", [*parts[:-1], (parts[-1] if parts else "") + values[0], *values[1:]])
    return parts if any(parts) or begun else [], position


def _expansion_end(text: str, position: int) -> int | None:
    """Where the expansion that begins at `position` ends; None if none does."""
    if text.startswith("${", position):
        return _closing(text, position + 2, "}") + 1
    match = SIMPLE.match(text, position)
    return match.end() if match else None


def _closing(text: str, start: int, closer: str) -> int:
    """Position of the `closer`, a brace or double quote, of what begins before `start`."""
    position = start
    while position < len(text) and text[position] != closer:
        if end := _expansion_end(text, position):
            position = end
        elif text[position] == '"':
            position = _closing(text, position + 1, '"') + 1
        elif closer == "}" and (single := SINGLE.match(text, position)):  # pairs even in double quotes
            position = single.end()
        else:
            position += 2 if text[position] == "\\" else 1
    if position >= len(text):
        raise _unclosed(text, start - 1)
    return position


def _unclosed(text: str, position: int) -> ShellError:
    kind = "bracket" if text[position] == "{" else "quote"
    return ShellError(f"a {kind} is never closed: {text[position : _line_end(text, position)]}")


def _double_quoted(text: str, known: Values) -> list[str]:
    """The text's words: one, unless it is an array alone."""
    if re.fullmatch(r"\$\{\w+\[[@*]\]\}|\$[@*]", text):
        return _expanded(text, known, quoted=True)
    return [_text(text, known, quoted=True)]


def _text(text: str, known: Values, quoted: bool) -> str:
    """The text without its quotes, with its expansions, as one word."""
    parts: list[str] = []
    position = 0
    while position < len(text):
        if plain := PLAIN.match(text, position):
            parts.append(plain.group())
            position = plain.end()
        elif text[position] == '"':
            end = _closing(text, position + 1, '"')
            parts.append(_text(text[position + 1 : end], known, quoted=True))
            position = end + 1
        elif not quoted and (single := SINGLE.match(text, position)):
            parts.append(single.group(1))
            position = single.end()
        elif end := _expansion_end(text, position):
            parts.append(" ".join(_expanded(text[position:end], known, quoted)))
            position = end
        elif text[position] == "\\":
            escaped = text[position + 1 : position + 2]
            keeps = quoted and escaped not in '"\\\n$`'
            parts.append(text[position : position + 2] if keeps else escaped.strip("\n"))
            position += 2
        else:
            parts.append(text[position])
            position += 1
    return "".join(parts)


def _split(text: str, known: Values) -> list[str]:
    """Words of a text that is not in quotes."""
    words: list[str] = []
    position = 0
    while position < len(text):
        if text[position].isspace():
            position += 1
        elif END.match(text, position) or REDIRECTION.match(text, position):  # letters like any other, in a default
            return [_text(text, known, quoted=False)]
        else:
            word, position = _word(text, position, known)
            words += word
    return words


def _expanded(piece: str, known: Values, quoted: bool = False, splits: bool = False) -> list[str]:
    """Values of an expansion; `.` for the script's own folder; what is not understood or not known as it stands.
    `splits`: blanks in the values part words."""
    if piece in ("$@", "$*"):  # nothing is given to the script
        return known.get(piece[1:], [])
    if piece.startswith("$((") and piece.endswith("))"):
        number = _calculated(piece[3:-2], known)
        _forget_set(piece[3:-2], known)
        return [piece if number is None else str(number)]
    if piece.startswith("$(") and OWN_FOLDER.search(piece):
        return ["."]
    match = PARAMETER.fullmatch(piece)
    if match is None:
        return [piece]
    name, index, colon, operation, word = match.group(1) or match.group(6), *match.groups()[1:5]
    values = known.get(name)
    if values == [f"${name}"]:
        return [piece if operation == "+" else f"${name}"]
    if values and index is not None:
        try:
            values = _elements(values, _text(index, known, quoted))
        except LookupError:
            return [piece]
    is_given = values is not None and (not colon or any(values))
    if operation == "+" or (operation and not is_given):
        if operation == "+" and not is_given:
            return [] if splits else [""]
        word = word.replace("\\}", "}") if quoted else word
        values = _split(word, known) if splits else [_text(word, known, quoted)]
        if operation == "=" and index is None:
            known[name] = [" ".join(values)]
        return values
    if values is None:
        return [piece]
    values = values if index in ("@", "*") else values[:1]
    return " ".join(values).split() if splits else values


def _elements(values: list[str], index: str) -> list[str] | None:
    """Elements of an array at the index or key, all for @ and *; None if there is none. Raises LookupError if that is
    not known."""
    keyed = _keyed(values)
    if index in ("@", "*") and not (keyed and len(keyed) > 1):  # bash gives keyed ones in an order of its own
        return [*keyed.values()] if keyed else values
    if "$" in index or index in ("@", "*") or not (keyed or index.isdecimal()):
        raise LookupError(index)
    found = keyed.get(index) if keyed else values[int(index)] if int(index) < len(values) else None
    return None if found is None else [found]


def _keyed(values: list[str]) -> dict[str, str]:
    """Elements by key, of an array whose elements all have one; empty for any other."""
    found = [ELEMENT.fullmatch(value) for value in values]
    return {match[1]: match[2] for match in found if match} if all(found) else {}


def _calculated(text: str, known: Values) -> int | None:
    """Value of an arithmetic expression as bash computes it; None unless it is plain arithmetic of whole numbers."""
    # Of a bare name bash takes the value, and of $NAME the text: with N="2 + 3", N * 2 is 10 and $N * 2 is 8.
    text = NAME.sub(lambda name: f"({(known.get(name[0]) or name)[0]})", _text(text, known, quoted=True)).strip()
    return whole_number(text)


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
