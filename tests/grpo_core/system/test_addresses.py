"""Secrets in addresses are seen in every spelling, and none is seen where there is none."""

from __future__ import annotations

import pytest

from grpo_core.errors import ConfigError
from grpo_core.system.addresses import holds_secret, is_web_address, key_in


@pytest.mark.parametrize(
    "address",
    [
        "https://grpo:SECRET@mlflow.internal",
        "HTTPS://:SECRET@mlflow.internal",
        "https://glpat-SECRET@mlflow.internal/api",
        "https://grpo:SEC/RET@mlflow.internal",
        "https://SEC#RET@mlflow.internal",
        "https://mlflow.internal/?token=SECRET",
        "https://mlflow.internal/?a=1&X-Amz-Signature=SECRET",
        "https://mlflow.internal/?API_KEY=SECRET",
        "postgresql://grpo:SECRET@db/mlflow",
        "postgresql+psycopg2://grpo:SEC/RET@db/mlflow",
        "postgresql://db/mlflow?user=grpo&password=SECRET",
        "https://store.example/artifacts?sv=2024&sig=SECRET",
        "https://mlflow.internal/?key=SECRET",
        "https://mlflow.internal/#SECRET",
        "https://mlflow.internal/?SECRET",
        "https://mlflow.internal/?api-version=1&code=SECRET",
        "postgresql://grpo:SEC?RET@db/mlflow",
        "postgresql://grpo@corp:SECRET@db/mlflow",
        "mssql+pyodbc:///?odbc_connect=DRIVER%3Dx%3BUID%3Dme%3BPWD%3DSECRET",
        "mssql+pyodbc:///?odbc_connect=DRIVER%253Dx%253BPWD%253DSECRET",
        "mysql://db/mlflow?access_key=SECRET",
        " https://grpo:SECRET@mlflow.internal\n",
        "git+https://SECRET@models.example/rewards",
        "wss://SECRET@games.example/ws",
        "wss://games.example/ws?code=SECRET",
    ],
)
def test_an_address_with_a_secret_is_known(address: str) -> None:
    assert holds_secret(address)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "https://mlflow.internal:5000/team/a",
        "http://[::1]:4200/api",
        "http://[::1",
        "https://models.example/openai?api-version=2024-10-21",
        "sqlite:////home/me@work/a:b/mlflow.db",
        "postgresql://grpo@db:5432/mlflow?sslmode=verify-full&sslkey=/etc/key&passfile=/etc/pgpass",
        "databricks://profile",
        "/storage/mlflow",
    ],
)
def test_an_address_without_a_secret_is_left_alone(address: str) -> None:
    assert not holds_secret(address)


@pytest.mark.parametrize("value", ["", "  sk-123\n", "sk-123"])
def test_a_key_is_read_without_white_space_around_it(value: str) -> None:
    assert key_in("KEY", {"KEY": value}) == value.strip()


@pytest.mark.parametrize("value", ["sk 123", "sk-12\x00", "sk-é", "'sk-123'", "sk-1\n23"])
def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(value: str) -> None:
    with pytest.raises(ConfigError, match="the value of KEY has a space, quote") as refused:
        key_in("KEY", {"KEY": value})
    assert "sk" not in str(refused.value)
    with pytest.raises(ConfigError, match="KEY holds nothing but white space"):
        key_in("KEY", {"KEY": " \n"})


@pytest.mark.parametrize(
    ("address", "is_one"),
    [
        ("http://10.0.0.5:8000", True),
        ("https://models.example", True),
        ("http://[::1]:8000", True),
        ("10.0.0.5:8000", False),
        ("ftp://10.0.0.5", False),
        ("http://10.0.0.5:port", False),
        ("http://10.0.0.5:70000", False),
        ("http://[::1", False),
        ("http://", False),
        ("http://10.0.0.5:0", False),
        (" http://10.0.0.5", False),
        ("http://10.0.0.5\n", False),
        ("http://10.0 .0.5", False),
    ],
)
def test_a_web_address_has_a_host_and_a_port_that_is_one(address: str, is_one: bool) -> None:
    assert is_web_address(address) == is_one
