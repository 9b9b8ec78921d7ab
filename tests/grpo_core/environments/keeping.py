"""An environment that keeps a connection and a background task from one call to the next."""

from __future__ import annotations

import asyncio
from typing import Any

from websockets.asyncio.client import connect


class Keeping:
    """Hears what its server says, whenever that is."""

    async def reset(self, url: str = "", **row: Any) -> None:
        self.connection = await connect(url, proxy=None)
        self.heard: list[str] = []
        self.listening = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        async for text in self.connection:
            self.heard.append(str(text))
            await self.connection.send(f"heard {text}")

    async def say(self, text: str) -> str:
        """Sends a text.

        Args:
            text: The text.
        """
        await self.connection.send(text)
        return " ".join(self.heard)

    def own_loop(self) -> str:
        """Uses an event loop of its own, as a plain method may."""
        return asyncio.run(asyncio.sleep(0, "done"))
