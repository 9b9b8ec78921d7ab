"""MLflow's SQLite file, made completely or not at all: MLflow cannot continue migrations that a full disk or a kill has
interrupted, so the file could never be used again."""

from __future__ import annotations

import tempfile
from pathlib import Path

from mlflow.store.db.utils import _initialize_tables, create_sqlalchemy_engine
from sqlalchemy.exc import OperationalError

from tasks.stages.files import cannot_grow, is_full
from tasks.stages.mlflow_address import TrackingError


def make_database(file: Path) -> None:
    """Make MLflow's database, unless the file exists. Raises TrackingError if the disk is full."""
    if file.exists():
        return
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        new = Path(folder) / file.name
        new.touch()  # SQLite itself would let only the owner write, whatever the umask
        try:
            engine = create_sqlalchemy_engine(f"sqlite:///{new}")
            _initialize_tables(engine)
            engine.dispose()
        except OperationalError as error:
            if is_full(error):
                raise TrackingError(cannot_grow(file)) from error
            raise
        try:
            file.hardlink_to(new)
        except FileExistsError:  # another process was faster
            pass
        except OSError:  # a file system without links
            if not file.exists():
                new.rename(file)
