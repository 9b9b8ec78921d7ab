"""`python examples/notifications/mlflow_webhook.py URL`: MLflow's server POSTs each alias and tag of a version to URL.

Makes, or makes again, a webhook of MLflow's model registry. What it sends is signed with $GRPO_WEBHOOK_SECRET;
`is_genuine` is for the receiver. Only an MLflow server sends webhooks: clients that write to a SQLite file send none.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import hmac
import os
import time
from collections.abc import Mapping

from mlflow import MlflowClient
from mlflow.entities.webhook import WebhookEvent

NAME = "grpo-versions"
EVENTS = ("model_version_alias.created", "model_version_alias.deleted", "model_version_tag.set")
SECRET = "GRPO_WEBHOOK_SECRET"
OLDEST = 300  # seconds; a request that was recorded and is sent again later is refused


def listen(url: str, secret: str) -> None:
    """Have MLflow's server POST to `url` when an alias or a tag of a model version changes."""
    client = MlflowClient()
    for known in client.list_webhooks():
        if known.name == NAME:
            client.delete_webhook(known.webhook_id)
    events = [WebhookEvent.from_str(name) for name in EVENTS]
    client.create_webhook(NAME, url, [*events], "Aliases and tags of model versions.", secret)


def is_genuine(headers: Mapping[str, str], body: bytes, secret: str) -> bool:
    """Whether the request comes from the MLflow server that knows the secret, within the last minutes."""
    delivery, moment, signature = (
        headers.get(f"X-MLflow-{it}", "") for it in ("Delivery-Id", "Timestamp", "Signature")
    )
    signed = f"{delivery}.{moment}.".encode() + body
    digest = hmac.new(secret.encode(), signed, hashlib.sha256).digest()
    expected = f"v1,{base64.b64encode(digest).decode()}"
    is_known = hmac.compare_digest(signature.encode(), expected.encode())
    return is_known and abs(time.time() - int(moment)) < OLDEST


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Have MLflow POST aliases and tags of model versions, signed.")
    parser.add_argument("url", help="where to, such as https://deploy.internal/hooks/mlflow")
    if not os.environ.get(SECRET):
        parser.error(f"set {SECRET} to the secret that the receiver knows too")
    listen(parser.parse_args().url, os.environ[SECRET])
