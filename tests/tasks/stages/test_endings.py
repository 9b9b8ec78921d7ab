"""What a flow's function is given and gives, around the work itself."""

from __future__ import annotations

import logging
import signal

import pytest
from prefect import tags
from prefect.context import TagsContext
from prefect.exceptions import Abort, TerminationSignal

from tasks.stages import endings
from tasks.stages.endings import end_in_plain_words
from tasks.stages.errors import Interrupted


def test_tasks_do_not_inherit_the_tags_of_their_run() -> None:
    with tags("grpo"):
        assert end_in_plain_words(lambda: TagsContext.get().current_tags)() == set()


@pytest.mark.parametrize(("back", "raised"), [("it goes on by itself", Abort), ("", TerminationSignal)])
def test_a_deployment_s_run_that_is_told_to_end_ends_without_a_crash_if_it_comes_back(
    back: str, raised: type[BaseException], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def told() -> None:
        raise Interrupted("train was interrupted, 3 of 6 updates saved", TerminationSignal(15))

    caplog.set_level(logging.INFO)
    asked: list[str] = []
    monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__ID", "some")
    monkeypatch.setattr(endings, "schedule_again", lambda what: asked.append(what) or back)
    monkeypatch.setattr(endings, "get_run_logger", logging.getLogger)
    monkeypatch.setattr("atexit.register", lambda leave: None)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(raised):
            end_in_plain_words(told)()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert asked == ["train was interrupted, 3 of 6 updates saved"]
    [said] = caplog.messages
    assert ("goes on by itself" in said, "run the same again" in said) == (bool(back), not back)
