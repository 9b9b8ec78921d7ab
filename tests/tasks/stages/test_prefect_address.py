"""What a failed request to Prefect's server is called; requests to others are none of its business."""

from __future__ import annotations

import httpx
import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks.stages.prefect_address import describe_server_failure
from tests.serving import free_ports


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_named_with_the_reason_whatever_wraps_it() -> None:
    url = f"http://127.0.0.1:{free_ports(1)[0]}/api"
    with (
        temporary_settings({PREFECT_API_URL: url}),
        pytest.raises(RuntimeError) as error,
        SyncPrefectClient(url) as client,
    ):
        try:
            client.read_flow_runs()
        except Exception as cause:
            raise RuntimeError("no slot could be taken") from cause
    with temporary_settings({PREFECT_API_URL: url}):
        said = describe_server_failure(error.value)
    assert said.startswith(f"Prefect's server at {url} does not answer (Connection refused): ")


def test_a_request_to_another_server_is_not_taken_for_one() -> None:
    request = httpx.Request("GET", "https://huggingface.co/api/models")
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:4200/api"}):
        assert describe_server_failure(httpx.ConnectError("no route to host", request=request)) == ""
        assert describe_server_failure(ValueError("wrong")) == ""
