"""A teacher behind a vLLM server: how it is asked, and what rules it out. Imports no torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx2

from grpo_core.config.run import RunConfig
from grpo_core.data.teacher import OTHER_TOKENIZER, SHOWN
from grpo_core.errors import ConfigError, EngineError
from grpo_core.system.addresses import key_in

KEY = "GRPO_TEACHER_API_KEY"  # environment variable with the server's key (`vllm serve --api-key`)
CHECK_SECONDS = 60.0  # for an answer before the training
CONNECT_SECONDS = 30.0
# An idle connection may be closed by the server just when it is used again.
UNUSED_CLOSE = httpx2.Limits(max_keepalive_connections=0)
IDS_PER_REQUEST = 4096
NOT_A_NUMBER = -9999.0  # in vLLM's answers, for a log-probability of -inf
ROUNDING = 1e-3  # by which a log-probability may be above 0


def client_options(config: RunConfig, seconds: float) -> dict[str, Any]:
    """Options of a client of the teacher's server, with the key of this environment. `seconds`: longest wait for an
    answer. Raises ConfigError for a key that `key_in` refuses."""
    return {
        "base_url": config.teacher.url,
        "headers": {"Authorization": f"Bearer {key}"} if (key := key_in(KEY)) else {},
        "timeout": httpx2.Timeout(seconds, connect=CONNECT_SECONDS, pool=None),
        "trust_env": False,  # through no proxy
    }


def connect(config: RunConfig) -> httpx2.Client:
    """Client that asks the teacher's server one question after the other."""
    return httpx2.Client(**client_options(config, CHECK_SECONDS), limits=UNUSED_CLOSE)


def ask(http: httpx2.Client, path: str, body: Any = None) -> Any:
    """Return the server's answer. Raises httpx2.HTTPError if it gives none, ValueError for one that is not JSON."""
    return content_of(http.request("GET" if body is None else "POST", path, json=body))


def content_of(answer: httpx2.Response) -> Any:
    """Return what the server has answered. Raises httpx2.HTTPStatusError if it refuses, ValueError if that is not
    JSON."""
    if not answer.is_success:
        key = f" (its key: the environment variable {KEY})" if answer.status_code in (401, 403) else ""
        moved = f" (moved to {answer.headers['Location']})" if "Location" in answer.headers else ""
        said = f"{answer.request.url.path} answers {answer.status_code}{key}{moved}: {answer.text[:500]}"
        raise httpx2.HTTPStatusError(said, request=answer.request, response=answer)
    return answer.json()


def teacher_among(config: RunConfig, answer: Any) -> dict[str, Any]:
    """The model of a server's answer to /v1/models that is the teacher: by its name or, without one, the server's own.
    Raises EngineError if there is none of that name."""
    models = answer["data"]
    longest = next((each["max_model_len"] for each in models if each.get("max_model_len")), None)  # of its adapters too
    for each in models:
        if each["id"] == config.teacher.model or (config.teacher.model is None and not each.get("parent")):
            return {**each, "max_model_len": longest}
    raise EngineError(
        f"the server has {', '.join(repr(each['id']) for each in models) or 'no model'}, and teacher.model is "
        f"{config.teacher.model!r}: name one of them, or another server"
    )


def scoring(model: str, ids: Sequence[int]) -> dict[str, Any]:
    """Body of the request for the log-probabilities of these ids. vLLM must sample a token to score a prompt."""
    return {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}


def logprobs_of(answer: Any, ids: Sequence[int], first: int) -> list[float]:
    """Return the log-probabilities of the ids from place `first` on, which is not 0. Raises EngineError for one that is
    missing, or no log-probability."""
    given = answer["choices"][0].get("prompt_logprobs") or []
    found = []
    for place in range(first, len(ids)):
        there = given[place] if len(given) == len(ids) else None
        value = (there or {}).get(str(ids[place]), {}).get("logprob")
        if not isinstance(value, float | int) or not NOT_A_NUMBER < value <= ROUNDING:
            raise EngineError(
                f"the teacher's server gives the token {ids[place]} at place {place} of {len(ids)} the log-probability "
                f"{value}; needed is a number of at most 0 for each token of a prompt, as vLLM gives by default "
                "(--logprobs-mode raw_logprobs)"
            )
        found.append(value)
    return found


def check_served(config: RunConfig, longest: int = 0, rows: int | None = None) -> str:
    """Return a sentence about the teacher that the server has. Raises ConfigError unless it answers, has the teacher,
    takes `longest` tokens and, given the `rows` of the policy's embedding, knows all of its ids."""
    with _refusing(config), connect(config) as http:
        model = teacher_among(config, ask(http, "/v1/models"))
        most = model["max_model_len"]
        if most is not None and longest >= most:  # it has to sample one more token
            raise EngineError(
                f"it takes sequences of {most:,} tokens, one of them its own, and {config.teacher.read_at_most} has "
                f"{longest:,}: lower rollout.max_completion_length, or start it with a larger --max-model-len"
            )
        if rows:
            ids = [rows - 1] * 2
            logprobs_of(ask(http, "/v1/completions", scoring(model["id"], ids)), ids, 1)
    return f"the teacher is {model['id']!r} ({model.get('root')}) at {config.teacher.url}"


def check_served_tokenizer(config: RunConfig, ids: Iterable[int], decode: Callable[[list[int]], str]) -> None:
    """Raises ConfigError unless the server turns each of the policy's ids into the text into which `decode` turns it.
    Names the first that differ."""
    ids = sorted(ids)
    between = ids[0]  # a token before each id, so that no text is taken for that of its neighbours

    def sequence(part: Sequence[int]) -> list[int]:
        return [token for number in part for token in (between, number)]

    with _refusing(config), connect(config) as http:
        name = teacher_among(config, ask(http, "/v1/models"))["id"]

        def text(part: list[int]) -> str:
            return ask(http, "/detokenize", {"model": name, "tokens": part})["prompt"]

        def differing(part: Sequence[int]) -> Iterator[int]:
            if text(sequence(part)) == decode(sequence(part)):
                return
            if len(part) == 1:
                yield part[0]
                return
            yield from differing(part[: len(part) // 2])
            yield from differing(part[len(part) // 2 :])

        starts = range(0, len(ids), IDS_PER_REQUEST // 2)
        found = (number for start in starts for number in differing(ids[start : start + IDS_PER_REQUEST // 2]))
        unlike = [*itertools.islice(found, SHOWN)]
        if unlike[:1] == [between]:
            unlike = [between]  # then all seem to differ
        if unlike:
            shown = "; ".join(f"{number} is {decode([number])!r} and {text([number])!r}" for number in unlike)
            raise EngineError(
                f"its tokenizer is not that of {config.model.name_or_path!r}: ids differ (the first: {shown}). "
                f"{OTHER_TOKENIZER}"
            )


@contextmanager
def _refusing(config: RunConfig) -> Iterator[None]:
    """Raise ConfigError for what is wrong with the server or its answers."""
    try:
        yield
    except (httpx2.HTTPError, EngineError, ValueError, LookupError, TypeError) as error:
        known = isinstance(error, EngineError | httpx2.HTTPStatusError)
        text = str(error)
        if not known:
            text = f"no answer of a vLLM server: {error!r}; start it (vllm serve MODEL), or correct the address"
        raise ConfigError(f"teacher.url = {config.teacher.url!r}: {text}") from None
