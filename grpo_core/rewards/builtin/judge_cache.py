"""A judge's answers and their cost, in one SQLite file that processes of one machine share.

Every change is one transaction: a process that is killed leaves each request counted or not, each answer kept or not.
"""

from __future__ import annotations

import json
import os
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from grpo_core.errors import RewardError

FILE = "judge.sqlite"
BUSY_SECONDS = 60.0  # to wait for another process's transaction, which takes milliseconds
SCHEMA = """
PRAGMA journal_mode = wal;
CREATE TABLE answers (digest TEXT PRIMARY KEY, answer TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE costs (kind TEXT PRIMARY KEY, amount INTEGER NOT NULL) WITHOUT ROWID;
"""
# Primary error codes of a file that is not a sound database of this kind; SQLITE_ERROR if a table is missing.
DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)


@dataclass(frozen=True)
class Cache:
    """An open cache. Its methods raise RewardError if the file cannot be used or is damaged."""

    folder: Path
    database: sqlite3.Connection

    def answer(self, digest: str) -> str | None:
        """The answer to the request of that digest; None if none is kept."""
        with _named(self.folder):
            row = self.database.execute("SELECT answer FROM answers WHERE digest = ?", (digest,)).fetchone()
            return None if row is None else json.loads(row[0])

    def keep(self, digest: str, answer: str) -> None:
        """Keep an answer. As JSON: it may hold half a surrogate pair, which SQLite does not take for text."""
        with _named(self.folder):
            self.database.execute("REPLACE INTO answers VALUES (?, ?)", (digest, json.dumps(answer)))

    def count_request(self, budget: Mapping[str, int | None]) -> None:
        """Count one request. Raises RewardError instead if a limit in `budget`, by kind of cost, is reached."""
        with self._transaction():
            for kind, limit in budget.items():
                if limit is not None and self._cost(kind) >= limit:
                    raise RewardError(
                        f"the judge's budget of {limit} {kind} is spent: raise budget_{kind} and run again, or name "
                        f"another cache (what {self.folder} has cost counts)"
                    )
            self._add("requests", 1)

    def count_tokens(self, tokens: int) -> None:
        """Add tokens to what the folder has cost."""
        with self._transaction():
            self._add("tokens", tokens)

    def _cost(self, kind: str) -> int:
        (total,) = self.database.execute("SELECT total(amount) FROM costs WHERE kind = ?", (kind,)).fetchone()
        return int(total)

    def _add(self, kind: str, amount: int) -> None:
        more = "ON CONFLICT DO UPDATE SET amount = amount + excluded.amount"
        self.database.execute(f"INSERT INTO costs VALUES (?, ?) {more}", (kind, amount))

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """One transaction, which other processes wait for from its start; undone if an error leaves the block."""
        with _named(self.folder):
            self.database.execute("BEGIN IMMEDIATE")
            with self.database:
                yield


@contextmanager
def open_cache(folder: Path) -> Iterator[Cache]:
    """Open the cache in that folder; make it if it is not there."""
    with _named(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / FILE).exists():
            _make(folder)
        database = sqlite3.connect(folder / FILE, timeout=BUSY_SECONDS, isolation_level=None)
    with closing(database):
        with _named(folder):
            # The write-ahead log keeps the file sound after a power cut, which may cost the last answers.
            database.execute("PRAGMA synchronous = normal")
        yield Cache(folder, database)


def _make(folder: Path) -> None:
    """Make the file whole under another name and then link it, so that no process sees it half made. If another process
    was faster, its file stays."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".judge.") as draft:
        made = Path(draft) / FILE
        made.touch()  # SQLite itself would let only the owner write, whatever the umask
        with closing(sqlite3.connect(made)) as database:
            database.executescript(SCHEMA)
        with suppress(FileExistsError):
            os.link(made, folder / FILE)


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    """Turn errors of the file in the folder into a RewardError that names the folder and says what to do."""
    try:
        yield
    except (OSError, sqlite3.Error, ValueError) as error:
        code = getattr(error, "sqlite_errorcode", None)
        if isinstance(error, ValueError) or (code is not None and code & 0xFF in DAMAGED):
            raise RewardError(
                f"cache={str(folder)!r}: {FILE} is damaged ({error}). Restore it, or remove {folder / FILE}* and run "
                "again: what was graded is then asked for again, and what that has cost is forgotten"
            ) from error
        raise RewardError(
            f"cache={str(folder)!r} cannot be used: {error}; name a folder on a disk of this machine"
        ) from error
