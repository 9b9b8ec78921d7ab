"""What a flow's function is given and gives, around the work itself."""

from __future__ import annotations

from prefect import tags
from prefect.context import TagsContext

from tasks.stages.endings import plain


def test_tasks_do_not_inherit_the_tags_of_their_run() -> None:
    with tags("grpo"):
        assert plain(lambda: TagsContext.get().current_tags)() == set()
