"""Where MLflow is: what is taken from the environment."""

from __future__ import annotations

import pytest

from tasks.tracking import tracking_uri


def test_a_tracking_uri_with_a_password_is_refused_without_saying_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://grpo:hidden@mlflow.internal")
    with pytest.raises(ValueError, match=r"a password of mlflow\.internal.*set MLFLOW_TRACKING_USERNAME") as error:
        tracking_uri()
    assert "hidden" not in str(error.value)
