"""A server of OpenEnv's, run by an interpreter that has openenv-core: `python openenv_server.py PORT`."""

import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    number: int


class Told(Observation):
    said: str


class GuessEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.secret, self.steps = (seed or 0) % 10, 0
        return Told(said="a number from 0 to 9")

    def step(self, action, timeout_s=None, **kwargs):
        self.steps += 1
        if action.number < 0:
            raise ValueError("no such number")
        right = action.number == self.secret
        said = "right" if right else "higher" if action.number < self.secret else "lower"
        return Told(said=said, done=right, reward=1.0 if right else -0.25)

    @property
    def state(self):
        return State(step_count=self.steps)


app = create_fastapi_app(GuessEnvironment, Guess, Told, max_concurrent_envs=8)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
