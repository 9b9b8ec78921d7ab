"""Games of TextArena: the policy's move is a tool call."""

from __future__ import annotations

import random
import re
from typing import Any

from grpo_core.errors import install

try:
    import textarena
    from textarena.core import ObservationType
except ImportError as error:
    raise ImportError(f"install it: {install('textarena')}") from error

MOVE = re.compile(r"\[[^\[\]]+\]")


class TextArena:
    """One game per conversation, such as `TicTacToe-v0`. With two `players`, the other one draws among the moves that
    the game lists as available. Who begins, what the game draws and the other player's moves follow from the row's
    column `seed`, or else from its number."""

    def __init__(self, game: str, players: int = 1) -> None:
        if players not in (1, 2):
            raise ValueError(f"players={players}: a game is played alone (1) or against one other (2)")
        self.name, self.players = game, players

    def reset(self, seed: int | None = None, **row: Any) -> str:
        """The rules, and the game as it stands when it is the policy's turn."""
        seed = random.randrange(2**31) if seed is None else seed
        self.draws = random.Random(seed)
        self.me = self.draws.randrange(self.players)
        self.game = textarena.make(f"{self.name}-raw")
        self.game.reset(num_players=self.players, seed=seed)
        self.is_over = False
        return "\n" + self._until_my_turn()

    def move(self, action: str) -> str:
        """Makes a move in the game.

        Args:
            action: The move, in the form that the rules ask for, such as [4].
        """
        if self.is_over:
            raise ValueError("the game is over")
        self.is_over, _ = self.game.step(action)
        return self._until_my_turn()

    def get_reward(self) -> float:
        """The game's own reward (1: won, -1: lost, in most games); -1 for a game that was not played to its end."""
        return float(self.game.state.rewards[self.me]) if self.is_over else -1.0

    def _until_my_turn(self) -> str:
        while not self.is_over and self.game.state.current_player_id != self.me:
            _, messages = self.game.get_observation()
            self.is_over, _ = self.game.step(self._draw_move(_text(messages, self.me)))
        if self.is_over:
            return _text(self.game.state.observations[self.me], 1 - self.me) + "\nThe game is over."
        return _text(self.game.get_observation()[1], self.me)

    def _draw_move(self, shown: str) -> str:
        listed = shown.rpartition("Available Moves:")[2] if "Available Moves:" in shown else ""
        moves = MOVE.findall(listed)
        if not moves:
            raise ValueError(f"{self.name} lists no available moves, among which the other player could draw")
        return self.draws.choice(moves)


def _text(messages: Any, me: int) -> str:
    """The text that the game and the other player have written."""
    own = ObservationType.PLAYER_ACTION
    return "\n".join(text for sender, text, kind in messages if not (sender == me and kind == own))
