"""A model version at OpenAI's addresses where there is no vLLM: `python -m tasks.registry.answering_server VERSION NAME
HOST PORT`, where VERSION is the version's folder.

The version's own code answers, one request after the other, each as a whole. A request says its sampling and the chat
template's variables, and has the secret in $GRPO_VLLM_SECRET: the proxy before this server adds them.
"""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import Mapping
from typing import Any

import uvicorn
from mlflow import pyfunc
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from grpo_core.errors import GrpoError
from grpo_core.model.pretrained import check_context
from grpo_core.rollout.vllm.secret_required import SecretRequired
from grpo_core.system.libraries import quiet_libraries
from tasks.registry.answering import OPENAI

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# Of these, log-probabilities are left out of the answer.
READ = {"model", "user", "max_completion_tokens", "logprobs", "top_logprobs", *OPENAI.values()}
OF_ROUTE = {COMPLETIONS: {"prompt"}, CHAT: {"messages", "chat_template_kwargs", "tools"}}
# What else a request may say, if it says this.
WITHOUT_EFFECT = {"n": 1, "stream": False, "tool_choice": "none", "presence_penalty": 0, "frequency_penalty": 0}


def answer(model: Any, path: str, said: Mapping[str, Any]) -> dict[str, Any]:
    """Answer a request of an `AnsweringModel`. Raises ValueError if it asks for what this server cannot do."""
    for name, value in said.items():
        if name not in READ | OF_ROUTE[path] and value != WITHOUT_EFFECT.get(name):
            raise ValueError(f"{name} = {value!r} needs vLLM, which is not installed here: leave it out")
    chat = path == CHAT
    if model.settings["conversational"] != chat:  # vLLM would answer, but not as evaluated
        raise ValueError(f"the model was not trained on such prompts: ask it at {COMPLETIONS if chat else CHAT}")
    if (prompt := said.get(key := "messages" if chat else "prompt")) is None:
        raise ValueError(f"{key}: missing")
    if not chat and not isinstance(prompt, str):
        raise ValueError("prompt: give one text; several, or tokens, need vLLM, which is not installed here")
    asked = {own: said[name] for own, name in OPENAI.items() if name in said}
    asked["max_new_tokens"] = limit = said.get("max_completion_tokens", asked.get("max_new_tokens"))
    asked["stop"] = [asked["stop"]] if isinstance(asked["stop"], str) else asked["stop"]
    variables = {**said.get("chat_template_kwargs", {}), **({"tools": said["tools"]} if "tools" in said else {})}
    given = model.encode(prompt, variables)
    length = given["input_ids"].shape[1]
    check_context(model.model.config, length + limit)
    text, tokens, ended = model.complete(given, asked)
    content = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    return {
        "id": uuid.uuid4().hex,
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": said["model"],
        "choices": [{"index": 0, **content, "logprobs": None, "finish_reason": "stop" if ended else "length"}],
        "usage": {"prompt_tokens": length, "completion_tokens": tokens, "total_tokens": length + tokens},
    }


def main() -> None:
    quiet_libraries()
    folder, name, host, port = sys.argv[1:]
    model: Any = pyfunc.load_model(folder).unwrap_python_model()
    if not hasattr(model, "encode"):
        sys.exit(f"{name}: an earlier release has registered this version; register it again")
    one_by_one = asyncio.Lock()

    async def complete(request: Request) -> Response:
        try:
            said = {"model": name} | {key: value for key, value in (await request.json()).items() if value is not None}
            if said["model"] != name:
                raise ValueError(f"the model {said['model']!r} is not served here, but {name!r}")
            async with one_by_one:
                if await request.is_disconnected():
                    return Response(status_code=499)
                return JSONResponse(await asyncio.to_thread(answer, model, request.url.path, said))
        except Exception as error:  # whatever a request says, of which kind or form
            text = str(error) if isinstance(error, ValueError | GrpoError) else repr(error)
            return JSONResponse({"error": {"message": text, "code": 400}}, status_code=400)

    listed = {"object": "list", "data": [{"id": name, "object": "model"}]}
    routes = [Route("/health", lambda _: Response()), Route("/v1/models", lambda _: JSONResponse(listed))]
    routes += [Route(path, complete, methods=["POST"]) for path in OF_ROUTE]
    app = Starlette(routes=routes, middleware=[Middleware(SecretRequired)])
    uvicorn.run(app, host=host, port=int(port), log_level="warning")


if __name__ == "__main__":
    main()
