"""Environments behind OpenEnv's protocol: a server that is running already, one session per conversation."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from typing import Any

import httpx2

from grpo_core.errors import install

try:
    from websockets.exceptions import ConnectionClosed
    from websockets.sync.client import ClientConnection, connect
except ImportError as error:
    raise ImportError(f"install it: {install('openenv')}") from error

SECONDS = 30.0  # for the server to accept a connection; answers have environment.tool_timeout
CLOSE_SECONDS = 5.0
MAX_BYTES = 1 << 24


class OpenEnv:
    """One session of the server at `url` (http://…) per conversation. The tool `step` takes an action in the form that
    the server asks for; the reward is the sum of what the steps gave."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        answer = httpx2.get(f"{self.url}/schema", timeout=SECONDS, follow_redirects=True)
        self.action = answer.raise_for_status().json()["action"]
        self.connection: ClientConnection | None = None

        def step(action: dict) -> str:
            return self._step(action)

        shape = {key: self.action[key] for key in ("properties", "required", "$defs") if key in self.action}
        shape.get("properties", {}).pop("metadata", None)
        step.__doc__ = (
            f"Acts in the environment.\n\nArgs:\n    action: A JSON object of this schema: {json.dumps(shape)}\n"
        )
        self.step = step  # type: ignore[method-assign]  # described with the server's own schema

    def reset(self, seed: int | None = None, **row: Any) -> str:
        """Return the first observation, as JSON. `seed`: the row's, or else it follows from the row's number."""
        self._close()
        address = "ws" + self.url.removeprefix("http") + "/ws"
        self.connection = connect(address, open_timeout=SECONDS, max_size=MAX_BYTES, proxy=None)
        self.total, self.done = 0.0, False
        seed = random.randrange(2**31) if seed is None else seed
        return "\n" + self._exchange("reset", {"seed": seed})

    def step(self, action: dict) -> str:
        """Replaced by `__init__`."""
        raise NotImplementedError

    def get_reward(self) -> float:
        """The sum of the steps' rewards. Ends the session."""
        self._close()
        return self.total

    def _step(self, action: dict[str, Any]) -> str:
        if self.done:
            raise ValueError("the episode is over")
        return self._exchange("step", action)

    def _exchange(self, kind: str, data: dict[str, Any]) -> str:
        assert self.connection
        self.connection.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(self.connection.recv())
        if answer["type"] == "error":
            details = answer["data"].get("errors")
            message = answer["data"].get("message", "the server gives no reason")
            raise ValueError(f"{message}: {json.dumps(details)}" if details else message)
        found = answer["data"]
        self.total += float(found.get("reward") or 0.0) if kind == "step" else 0.0
        self.done = bool(found.get("done"))
        return json.dumps(found["observation"], ensure_ascii=False) + ("\nThe episode is over." if self.done else "")

    def _close(self) -> None:
        if self.connection:
            with suppress(ConnectionClosed, TimeoutError):
                self.connection.send(json.dumps({"type": "close"}))
                self.connection.recv(timeout=CLOSE_SECONDS)  # nothing: the server closes
            self.connection.close()
        self.connection = None
