from __future__ import annotations

from pathlib import Path

import pytest

from examples import tiny


@pytest.fixture(scope="session")
def words_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for text of any kind, with a chat template."""
    folder = tmp_path_factory.mktemp("words")
    tokenizer = tiny.make_tokenizer([])
    tokenizer.save_pretrained(folder)
    tiny.make_model(tokenizer, context=1024).save_pretrained(folder)
    return folder
