"""`[environment]`: tools that the policy calls, and environments that it acts in, over several turns."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from grpo_core.config.base import LONGEST_SECONDS, MOST_GIB, Section

OWN_REWARD = "environment"  # name of the built-in reward that gives what an environment gave


class EnvironmentConfig(Section):
    environment_factory: str | dict[str, str] | None = None
    """A class, or a function that makes an instance, as `package.module:Class`, or a built-in environment's name: one
    instance per completion, whose public methods are the tools. Several by name: `{ maze = "my_envs:Maze", … }`; the
    column `environment` of each row then names the one that the row is for. Default: none."""
    environment_args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the class or function; with several environments, a table for each name."""
    tools: list[str] = Field(default_factory=list)
    """Functions that the policy may call in every row: built-in ones by name, your own as `package.module:function`."""
    max_turns: int = Field(16, ge=1)
    """Turns of the policy after which a conversation ends."""
    max_tool_calls: int = Field(64, ge=1)
    """Tool calls after which a conversation ends, with the answer to the last; a call that fails counts too."""
    tool_timeout: float = Field(30.0, gt=0, le=LONGEST_SECONDS)
    """Seconds that a tool call, `reset` or `get_reward` may take. A tool that takes longer is ended."""
    conversation_timeout: float = Field(600.0, gt=0, le=LONGEST_SECONDS)
    """Seconds that a conversation may wait for its environment in all; then it ends."""
    memory_gib: float = Field(2.0, gt=0, le=MOST_GIB)
    """Memory that the process of one environment may take, in GiB; shared memory does not count."""

    @property
    def factories(self) -> dict[str, str]:
        """Name → class; one environment without a name is called ""."""
        named = self.environment_factory
        return named if isinstance(named, dict) else {"": named} if named else {}

    @property
    def is_used(self) -> bool:
        """True if completions are conversations with tools or an environment."""
        return bool(self.environment_factory or self.tools)

    def args_of(self, name: str) -> dict[str, Any]:
        """Keyword arguments for the class of this environment."""
        return self.environment_args.get(name, {}) if name else self.environment_args

    @model_validator(mode="after")
    def _consistent(self) -> EnvironmentConfig:
        if self.environment_args and not self.environment_factory:
            raise ValueError("environment_args are for a class; name it in environment_factory")
        if isinstance(self.environment_factory, dict):
            if not self.environment_factory or "" in self.environment_factory:
                raise ValueError("environment_factory names no environment; write { NAME = 'module:Class' }")
            for name, args in self.environment_args.items():
                if name not in self.environment_factory or not isinstance(args, dict):
                    raise ValueError(
                        f"environment_args.{name}: with several environments, give a table of arguments for each of "
                        f"{sorted(self.environment_factory)}"
                    )
        if len(set(self.tools)) < len(self.tools):
            raise ValueError(f"tools={self.tools} names a tool twice")
        return self
