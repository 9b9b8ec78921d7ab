"""Data sets of the Hugging Face hub: their card may name only files of the hub.

A card's `data_files` may be any address. datasets asks it, from this machine and so from inside its network, before
datasets finds that the file is not the data set's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

CARD, STANDALONE = "README.md", ".huggingface.yaml"  # where datasets looks for the metadata


class ForeignFilesError(ValueError):
    """Raised if a data set's card names files outside of the hub; the message names one."""


def checked_revision(name: str, revision: str | None) -> str | None:
    """Return the commit of the data set's revision whose card has been looked at, or the revision itself if the hub
    cannot be reached, since datasets then takes what it has kept. Raises ForeignFilesError if the card names files
    outside of the hub, and the hub's errors."""
    import httpx2
    import yaml
    from huggingface_hub import DatasetCard, HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled, RemoteEntryNotFoundError

    hub = HfApi()
    try:
        commit = hub.dataset_info(name, revision=revision).sha
    except (OfflineModeIsEnabled, httpx2.TransportError):
        return revision
    for file in (CARD, STANDALONE):
        try:
            path = Path(hub.hf_hub_download(name, file, repo_type="dataset", revision=commit))
        except RemoteEntryNotFoundError:
            continue
        metadata = DatasetCard.load(path).data.to_dict() if file == CARD else yaml.safe_load(path.read_text())
        for text in _texts((metadata or {}).get("configs")):
            if text.startswith("/") or ("://" in text.removeprefix("hf://datasets/")):
                raise ForeignFilesError(
                    f"{file} names {text!r}, which is not in the data set: download what you need of it, and give the "
                    "files' paths"
                )
    return commit


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for inside in value.values() if isinstance(value, dict) else value:
            yield from _texts(inside)
