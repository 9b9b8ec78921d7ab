"""The repositories of the Hugging Face hub that take exports. The token is read by huggingface_hub alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_core.config.evaluation import PublishConfig
from grpo_core.config.run import RunConfig
from grpo_core.errors import ConfigError
from tasks.stages.errors import StageError
from tasks.stages.files import WEIGHTS

KEY = "publish.hub_repository"


def repository_of(publish: PublishConfig, made: str) -> str:
    """Repository of a format; "" if nothing is pushed."""
    name = publish.hub_repository or ""
    return name if not name or made == publish.formats[0] else f"{name}-{made}"


def check_hub(config: RunConfig) -> None:
    """Raises ConfigError if the hub would not take an export: for its name, or without a token that may write there."""
    repositories = [repository_of(config.publish, made) for made in config.publish.formats]
    if not any(repositories):
        return
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
    from huggingface_hub.utils import validate_repo_id

    for name in repositories:
        try:
            validate_repo_id(name)
        except HFValidationError as error:
            raise ConfigError(f"{KEY} = {config.publish.hub_repository!r}: {error}") from None
        if "/" not in name:
            raise ConfigError(f"{KEY} = {name!r} names no owner; write OWNER/NAME, OWNER a user or an organisation")
    if not get_token():
        raise ConfigError(
            f"{KEY} = {repositories[0]!r}, and there is no token of the hub: export HF_TOKEN, or `hf auth login`, with "
            f"one that may write; or remove {KEY}"
        )
    with _refusals(repositories[0], ConfigError):
        who = HfApi().whoami()
        for name in repositories:
            try:
                HfApi().auth_check(name, write=True)
            except RepositoryNotFoundError:
                _check_may_make(name, who)


def push(folder: Path, repository: str, message: str) -> str:
    """Upload the folder's files in one commit, which removes the weights of an earlier export, to the repository, which
    is made private if there is none. Returns the commit's address."""
    from huggingface_hub import HfApi

    with _refusals(repository, StageError):
        HfApi().create_repo(repository, private=True, exist_ok=True)
        done = HfApi().upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message=message,
            delete_patterns=[f"*{WEIGHTS}", "*.index.json"],
        )
        return str(done.commit_url)


def _check_may_make(name: str, who: dict[str, Any]) -> None:
    role = who.get("auth", {}).get("accessToken", {}).get("role")
    if role == "read":
        raise ConfigError(f"{KEY} = {name!r}: the hub's token may only read; give one that may write")
    owners = [who["name"], *(it["name"] for it in who.get("orgs", ()))]
    if (owner := name.partition("/")[0]) not in owners:
        raise ConfigError(
            f"{KEY} = {name!r} does not exist, and the token's user may not make it for {owner!r}: it may for "
            f"{', '.join(owners)}"
        )


@contextmanager
def _refusals(repository: str, kind: type[Exception]) -> Iterator[None]:
    """Raise the hub's refusals, and those of the way there, as sentences."""
    import httpx2
    from huggingface_hub import constants
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        yield
    except OfflineModeIsEnabled:
        raise kind(f"{repository}: HF_HUB_OFFLINE forbids to ask the hub; unset it, or remove {KEY}") from None
    except httpx2.HTTPError as error:  # huggingface_hub's too; they do not quote the token
        text = (
            f"{repository}: the hub ({constants.ENDPOINT}) does not take it or does not answer: {error}. Solve that, "
        )
        if password := httpx2.URL(constants.ENDPOINT).userinfo.decode():
            text = text.replace(f"{password}@", "")
        raise kind(f"{text}or remove {KEY}") from error
