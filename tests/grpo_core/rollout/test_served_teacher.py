"""A teacher behind a vLLM server: what is refused of it before a training, and what a training does when it is lost."""

from __future__ import annotations

import json
import math
import os
import queue
import random
import signal
import threading
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from flows.parameters.early_refusals import refuse_early
from grpo_core.config.files import parse_config
from grpo_core.config.run import RunConfig
from grpo_core.data.prompts import check_teacher_tokenizer
from grpo_core.data.served_teacher import KEY
from grpo_core.data.teacher import check_teacher
from grpo_core.errors import ConfigError, EngineError
from grpo_core.planning.hardware import named_gpu
from grpo_core.planning.shapes import load_teachers
from grpo_core.planning.wall_time import wall_time
from grpo_core.rollout import served_teacher
from grpo_core.rollout.served_teacher import served_logprobs
from grpo_core.rollout.waiting import ATTEMPTS, TEACHER, longest_wait, phase_limits
from grpo_core.training.session import load_session
from tasks.stages.lineage import lineage_keys
from tests.conftest import config_values, make_model, make_run, with_keys, write_sums
from tests.grpo_core.data.test_teacher import LENGTHS
from tests.grpo_core.planning.test_forecast import PACE, plan_of
from tests.grpo_core.training import killing
from tests.grpo_core.training.training import assert_same, figures_of
from tests.qwen import qwen
from tests.serving import free_ports, vllm_serve
from tests.teacher_server import Refusal, teacher_server

KEYS = {"vllm_server_timeout": 20.0, "vllm_request_timeout": 20.0}


def taught(values: dict[str, Any], url: str, **keys: Any) -> RunConfig:
    return parse_config({**with_keys(values, **KEYS), "teacher": {"url": url, **keys}})


def drawn(rows: int, longest: int, count: int = 100) -> list[tuple[list[int], list[int]]]:
    """Prompts and completions of random ids, of any length."""
    draw = random.Random(1)
    lengths = [sorted(draw.sample(range(1, longest), 2)) for _ in range(count)]
    ids = [[draw.randrange(rows) for _ in range(last)] for _, last in lengths]
    return [(each[:first], each[first:]) for each, (first, _) in zip(ids, lengths, strict=True)]


def expected(folder: Path, asked: list[tuple[list[int], list[int]]]) -> list[list[float]]:
    """transformers' log-probabilities of the completions, in float64."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        logprobs = [model(torch.tensor([prompt + ids])).logits[0].log_softmax(-1) for prompt, ids in asked]
    return [
        [row[len(prompt) + place - 1, token].item() for place, token in enumerate(ids)]
        for row, (prompt, ids) in zip(logprobs, asked, strict=True)
    ]


def largest_difference(found: list[list[float]], wanted: list[list[float]]) -> float:
    assert [len(row) for row in found] == [len(row) for row in wanted]
    return max(abs(a - b) for left, right in zip(found, wanted, strict=True) for a, b in zip(left, right, strict=True))


@pytest.fixture
def data(tmp_path: Path) -> None:
    for name in ("train", "eval"):
        write_sums(tmp_path / f"{name}.parquet", 10, 34)


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    """A teacher of another size than the policy, with its tokenizer."""
    return make_model(tmp_path / "teacher", hidden_size=128, initializer_range=0.1)


def test_each_completion_is_asked_for_once_at_a_server_that_is_lost_and_comes_back(
    values: dict[str, Any], teacher: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = drawn(15, 63)

    def lossy(path: str, number: int, answer: dict[str, Any]) -> dict[str, Any]:
        if path == "/health" and number < 3:
            raise Refusal(None)  # it is not up yet
        if path == "/v1/completions" and number % 9 == 4:
            raise Refusal([None, 500, 503][number % 3], "the engine is dead")
        return answer

    with teacher_server(teacher, "taught") as server:
        server.wrong = lossy
        found = [*served_logprobs(taught(values, server.url, model="taught"), asked)]
        said = [tuple(body["prompt"]) for path, body in server.said if path == "/v1/completions"]
    assert largest_difference(found, expected(teacher, asked)) < 1e-12
    assert {*said} == {(*prompt, *ids) for prompt, ids in asked}
    lost = sum(number % 9 == 4 for number in range(len(said)))
    assert lost > 10 and len(said) == len(asked) + lost
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(f"{server.url} is ")[2].partition(":")[0] for line in lines] == ["away", "back"]


@pytest.mark.parametrize(
    ("path", "says", "sentence"),
    [
        ("/v1/completions", 400, r"refuses: /v1/completions answers 400: why"),
        ("/v1/completions", 500, rf"{ATTEMPTS} attempts at one answer have failed; the last: .*answers 500: why"),
        ("/v1/models", {}, r"no answer of a vLLM server to /v1/models: KeyError\('data'\)"),
        ("/v1/completions", {"choices": []}, "no answer of a vLLM server to /v1/completions: IndexError"),
        ("/v1/completions", 307, r"refuses: /v1/completions answers 307 \(moved to https://elsewhere\): why"),
        ("/v1/models", 401, rf"answers 401 \(its key: the environment variable {KEY}\)"),
        ("/v1/completions", None, "gives the token 3 at place 2 of 3 the log-probability None; needed is"),
        ("/v1/completions", math.nan, "the log-probability nan"),
        ("/v1/completions", -9999.0, r"the log-probability -9999\.0"),
        ("/v1/completions", 7.5, r"the log-probability 7\.5; .*--logprobs-mode raw_logprobs"),
    ],
)
def test_an_answer_without_log_probabilities_ends_the_training(
    values: dict[str, Any], teacher: Path, path: str, says: Any, sentence: str
) -> None:
    def wrong(asked: str, number: int, answer: dict[str, Any]) -> dict[str, Any]:
        if asked == path and isinstance(says, int):
            raise Refusal(says, "why")
        if asked == path and isinstance(says, dict):
            return says
        if asked == path:
            answer["choices"][0]["prompt_logprobs"][2]["3"]["logprob"] = says
        return answer

    with teacher_server(teacher) as server:
        server.wrong = wrong
        with pytest.raises(EngineError, match=sentence):
            [*served_logprobs(taught(values, server.url), [([1, 2], [3])])]


def test_another_model_at_the_same_address_ends_the_training(values: dict[str, Any], teacher: Path) -> None:
    def moved(path: str, number: int, answer: dict[str, Any]) -> dict[str, Any]:
        return {"data": [{"id": "first", "root": "elsewhere"}]} if path == "/v1/models" and number else answer

    with teacher_server(teacher, "first") as server:
        server.wrong = moved
        config = taught(values, server.url)
        assert len([*served_logprobs(config, [([1, 2], [3])])]) == 1
        with pytest.raises(EngineError, match=r"started again with 'first' \(elsewhere\) instead of 'first' \(/"):
            [*served_logprobs(config, [([1, 2], [3])])]


def test_a_server_that_stays_away_or_hangs_is_given_up_within_the_time_limits(values: dict[str, Any]) -> None:
    [port] = free_ports(1)
    values = with_keys(values, vllm_server_timeout=0.2)
    config = parse_config({**values, "teacher": {"url": f"http://127.0.0.1:{port}"}})
    with pytest.raises(EngineError, match=r"is not available for 0\.2 s \(rollout\.vllm_server_timeout\): Connect"):
        [*served_logprobs(config, [([1], [2])])]
    limit = ATTEMPTS * (0.2 + 2 * config.rollout.vllm_request_timeout)
    assert phase_limits(config)[TEACHER] == limit
    assert longest_wait(config) - longest_wait(parse_config(values)) == timedelta(seconds=limit)
    assert phase_limits(parse_config(values))[TEACHER] == 0


def test_a_training_that_begins_waits_for_its_teachers_server(
    values: dict[str, Any],
    teacher: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(served_teacher, "POLL_SECONDS", 0.01)

    def loading(path: str, number: int, answer: dict[str, Any]) -> dict[str, Any]:
        if path == "/health" and number < 3:
            raise Refusal(503 if number else None)
        return answer

    with teacher_server(teacher) as server:
        server.wrong = loading
        load_session(make_run(tmp_path / "run", {**values, "teacher": {"url": server.url}}))
        paths = [path for path, _ in server.said]
    assert paths[:4] == ["/health"] * 4 and "/health" not in paths[4:]
    assert f"{server.url} is back" in capsys.readouterr().out
    values = with_keys(values, vllm_server_timeout=0.2) | {"teacher": {"url": server.url}}
    with pytest.raises(EngineError, match=r"is not available for 0\.2 s \(rollout\.vllm_server_timeout\): Connect"):
        load_session(make_run(tmp_path / "away", values))


class ToldToStop(BaseException):
    pass


def test_a_training_that_is_told_to_stop_waits_for_no_answer(values: dict[str, Any], teacher: Path) -> None:
    stopped, waited = threading.Event(), queue.Queue[bool]()

    def hanging(path: str, number: int, answer: dict[str, Any]) -> dict[str, Any]:
        if path == "/v1/completions":
            os.kill(os.getpid(), signal.SIGUSR1)
            waited.put(stopped.wait(60))
        return answer

    def stop(*_: Any) -> None:
        raise ToldToStop

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        with teacher_server(teacher) as server:
            server.wrong = hanging
            with pytest.raises(ToldToStop):
                [*served_logprobs(parse_config({**values, "teacher": {"url": server.url}}), [([1, 2], [3])])]
            stopped.set()
            assert waited.get(), "the answer was waited for"
    finally:
        signal.signal(signal.SIGUSR1, before)


REFUSALS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"name": "other"}, {"model": "mine"}, r"has 'adapter', 'other', and teacher\.model is 'mine': name one"),
    ({"length": 12}, {}, r"takes sequences of 12 tokens, one of them its own, .* has 12: lower rollout\.max_comp"),
    ({"key": "secret"}, {}, rf"/v1/models answers 401 \(its key: the environment variable {KEY}\)"),
]


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize(("server_keys", "keys", "sentence"), REFUSALS)
def test_a_server_without_the_teacher_is_refused_before_a_training(
    values: dict[str, Any],
    teacher: Path,
    monkeypatch: pytest.MonkeyPatch,
    server_keys: dict[str, Any],
    keys: dict[str, Any],
    sentence: str,
) -> None:
    values = with_keys(values, max_completion_length=11)
    with teacher_server(teacher) as server:
        refuse_early(taught(values, server.url))
        for name, value in server_keys.items():
            setattr(server, name, value)
        with pytest.raises(ConfigError, match=rf"teacher\.url = '{server.url}': .*{sentence}"):
            refuse_early(taught(values, server.url, **keys))
        monkeypatch.setenv(KEY, "secret")
        if "key" in server_keys:
            refuse_early(taught(values, server.url))
    with pytest.raises(ConfigError, match="no answer of a vLLM server: ConnectError"):
        refuse_early(taught(values, server.url))


def test_a_server_with_fewer_rows_than_the_policy_is_refused(values: dict[str, Any], tmp_path: Path) -> None:
    few = make_model(tmp_path / "few", vocab_size=14)
    with teacher_server(few) as server, pytest.raises(ConfigError, match="Token id 14 is out of vocabulary"):
        check_teacher(taught(values, server.url), 8)


@pytest.mark.parametrize(
    ("own", "other", "said"),
    [
        ({}, {"2": 6, "3": 5}, "5 is '2' and '3'; 6 is '3' and '2'"),
        ({"2x": 5}, {"x3": 6}, "5 is '2x' and '2'; 6 is '3' and 'x3'"),  # the same text, one after the other
        ({}, {"<end>": 0}, "0 is '<pad>' and '<end>'"),
        ({"*": 15}, {}, "15 is '*' and ''"),
    ],
)
def test_a_server_with_another_tokenizer_is_refused_with_the_first_ids_that_differ(
    values: dict[str, Any], teacher: Path, tmp_path: Path, own: dict[str, int], other: dict[str, int], said: str
) -> None:
    policy = make_model(tmp_path / "policy", vocab_size=15)
    values["model"] = {"name_or_path": str(policy)}
    for folder, changes in ((policy, own), (teacher, other)):
        known = json.loads((folder / "tokenizer.json").read_text())
        kept = {token: number for token, number in known["model"]["vocab"].items() if number not in changes.values()}
        known["model"]["vocab"] = kept | changes
        names = {number: token for token, number in changes.items()}
        for added in known["added_tokens"]:
            added["content"] = names.get(added["id"], added["content"])
        (folder / "tokenizer.json").write_text(json.dumps(known))
    with teacher_server(teacher) as server:
        for check in (check_teacher, check_teacher_tokenizer):  # by the policy's file, and as it is loaded
            with pytest.raises(ConfigError, match=r"tokenizer is not that of '.*': ids differ") as caught:
                check(taught(values, server.url))
            assert f"(the first: {said})" in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"teacher": {"url": "http://a:1", "divergence_beta": 0.5}}, "divergence_beta with url='http://a:1'"),
        ({"teacher": {"url": "http://a:1", "revision": "main"}}, "revision with url='http://a:1': a server has loaded"),
        ({"teacher": {"url": "http://me:hidden@a"}}, f"password or token, .* {KEY}"),
        ({"teacher": {"url": "10.0.0.5:8000"}}, "is not an address such as http://10"),
        ({"teacher": {"url": "http://a:1/v1/"}}, "leave /v1 out"),
        ({"teacher": {"url": "http://a:1"}, "temperature": 0.7}, r"rollout\.temperature=0\.7 with teacher\.url='http:"),
        ({"teacher": {"url": "http://a:1"}, "dynamic_sample": True}, "with teacher.url='http://a:1': groups"),
    ],
)
def test_keys_that_do_not_go_with_a_served_teacher_are_refused(
    values: dict[str, Any], keys: dict[str, Any], sentence: str
) -> None:
    others = {key: value for key, value in keys.items() if key != "teacher"}
    with pytest.raises(ConfigError, match=sentence) as caught:
        parse_config({**with_keys(values, **others), "teacher": keys["teacher"]})
    assert "hidden" not in str(caught.value)


def test_a_plan_counts_no_memory_and_no_time_for_a_served_teacher_and_says_so() -> None:
    values = config_values(Path("model"), Path("data"), mixed_precision="bf16", engine="transformers", max_steps=10)
    alone, config = parse_config(values), taught(values, "http://a:1", model="m")
    policy, gpu = qwen("1.5B"), named_gpu("H200")
    found, without = (
        wall_time(it, plan_of(it), LENGTHS, PACE, policy, gpu, load_teachers(it)) for it in (config, alone)
    )
    assert found["parts_hours"] == without["parts_hours"]
    assert "without the time in which the teacher's server answers, which is not known" in found["how"]
    assert "server" not in without["how"]


@pytest.mark.usefixtures("data")
def test_a_run_is_known_by_the_served_name_of_its_teacher_or_by_the_address(
    values: dict[str, Any], tmp_path: Path
) -> None:
    values["data"] = {name: str(tmp_path / f"{name}.parquet") for name in ("train", "eval")}
    named = lineage_keys(taught(values, "http://a:1", model="m"))
    assert lineage_keys(taught(values, "http://b:1", model="m")) == named
    unnamed = lineage_keys(taught(values, "http://a:1"))
    for config in (taught(values, "http://b:1"), taught(values, "http://a:1", model="n"), parse_config(values)):
        found = lineage_keys(config)
        for known in (named, unnamed):
            assert {name for name in known if found[name] != known[name]} >= {"train", "evaluate", "register"}


@pytest.mark.e2e
def test_vllm_teaches_as_transformers_does_and_a_kill_of_the_training_or_of_the_server_changes_no_weight(
    values: dict[str, Any], teacher: Path, tmp_path: Path
) -> None:
    asked, [port] = drawn(15, 63), free_ports(1)
    values = with_keys(values, max_steps=7, save_steps=3, num_iterations=2, steps_per_generation=4)

    def serve() -> AbstractContextManager[str]:
        return vllm_serve(teacher, port, tmp_path / "vllm.log", max_model_len=64)

    with ExitStack() as first, ExitStack() as second:
        url = first.enter_context(serve())
        config = taught(values, url, model="sums", weight=0.5)
        check_teacher(config, 63)
        check_teacher_tokenizer(config)
        with pytest.raises(ConfigError, match="takes sequences of 64 tokens"):
            check_teacher(config, 64)
        found = [*served_logprobs(config, asked)]
        assert largest_difference(found, expected(teacher, asked)) < 1e-4
        assert [*served_logprobs(config, asked[::-1])] == found[::-1], "whatever it is asked beside"
        whole, killed, lost = (
            make_run(tmp_path / name, {**values, "teacher": {"url": url}}) for name in ("whole", "killed", "lost")
        )
        assert killing.train(whole) == 0
        assert os.WTERMSIG(killing.train(killed, int((whole / "passes").read_text()) - 2)) == signal.SIGKILL
        assert killing.train(killed) == 0
        gone, went = os.pipe()

        def lose() -> None:
            first.close()
            os.write(went, b".")

        def come_back() -> None:
            os.read(gone, 1)
            second.enter_context(serve())

        coming_back = threading.Thread(target=come_back)
        coming_back.start()
        assert killing.train(lost, 3, lose) == 0  # in the first batch's updates, before the second is asked about
        coming_back.join()
    assert json.loads((killed / "training" / "result.json").read_text())["resumed_at_step"] == 3
    for run in (killed, lost):
        assert [step["teacher_kl"] > 0 for step in figures_of(run)] == [True] * 7
        assert_same(run, whole)
    local = make_run(tmp_path / "local", {**values, "teacher": {"model": str(teacher)}})
    assert killing.train(local) == 0
    for mine, other in zip(figures_of(local), figures_of(whole), strict=True):
        assert mine["teacher_kl"] == pytest.approx(other["teacher_kl"], abs=1e-4)
