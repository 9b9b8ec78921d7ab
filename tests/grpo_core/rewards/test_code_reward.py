"""The reward for code: which tests can be judged and how, and what programs do to pass without being right."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_core.config.inputs import RewardConfig
from grpo_core.rewards.batch import Batch
from grpo_core.rewards.builtin.code import last_block, unit_tests
from grpo_core.rewards.builtin.code_tests import UnitTestError, read_test
from grpo_core.rewards.contract import resolve
from grpo_core.rewards.scoring import score
from grpo_core.system.sandbox.bubblewrap import Call, Input, _rebuilt
from grpo_core.system.sandbox.inside import encoded

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
HASHABLE = st.recursive(SCALARS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=4)
DATA = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.sets(HASHABLE, max_size=3)
        | st.dictionaries(HASHABLE, inner, max_size=3)
    ),
    max_leaves=8,
)


def rewards(programs: list[str], tests: list[Any]) -> list[float | None]:
    completions = [f"So:\n```python\n{program}\n```" for program in programs]
    return asyncio.run(unit_tests(completions, [tests] * len(programs), cpu_seconds=1, wall_seconds=300.0))


@settings(max_examples=50, deadline=None)  # the machine may be busy
@given(DATA)
def test_data_leaves_the_sandbox_as_it_was(value: Any) -> None:
    assert _rebuilt(json.loads(encoded(value))) == value


@settings(max_examples=50, deadline=None)
@given(SCALARS | st.lists(SCALARS, max_size=3), SCALARS | st.lists(SCALARS, max_size=3))
def test_an_assertion_holds_where_it_does_in_python(answer: Any, expected: Any) -> None:
    assert read_test(f"assert f(1) == {expected!r}").passes(answer) == (answer == expected)
    assert read_test(f"assert not {expected!r} != f(1)").passes(answer) == (answer == expected)


@pytest.mark.parametrize(
    ("test", "asked", "right", "wrong"),
    [
        ("assert add(2, 3) == 5", "add(2, 3)", [5, 5.0], [6, "5", None, ..., [5]]),
        ("assert 5 == add(2, 3), 'sum'", "add(2, 3)", [5], [6]),
        ("assert abs(area(1) - 3.14159) < 1e-4", "area(1)", [3.14159], [3.2, "3.14159", float("nan"), None]),
        ("assert math.isclose(area(1), 3.14, rel_tol=1e-3)", "area(1)", [3.141], [4.0]),
        ("assert Solution().f([1, 2], k=3)[0] == 'a'", "Solution().f([1, 2], k=3)", [["a"], "a"], [[], {}, 7]),
        ("assert sorted(set(f(x=(1, 2)))) == [1, 2]", "f(x=(1, 2))", [[2, 1, 1], {1, 2}], [[1], 3]),
        ("assert not is_prime(9)", "is_prime(9)", [False, None, 0], [True]),
        ("assert Solution().valid('()') is True", "Solution().valid('()')", [True], [1, False]),
        ("assert f() is None", "f()", [None], [False, 0]),
        ("assert decode(encode('a')) == 'a'", "decode(encode('a'))", ["a"], ["b"]),
        ("assert PI > 3 and True", "PI", [3.1], [3]),
        ("assert len(f(','.join(['a', 'b']))) == -1 + 4", "f(','.join(['a', 'b']))", ["abc"], ["ab", 3]),
    ],
)
def test_assertions_ask_for_one_expression_and_judge_the_rest(
    test: str, asked: str, right: list[Any], wrong: list[Any]
) -> None:
    check = read_test(test)
    assert check.question == Call(asked)
    assert [check.passes(answer) for answer in right] == [True] * len(right)
    assert [check.passes(answer) for answer in wrong] == [False] * len(wrong)


@pytest.mark.parametrize(
    ("test", "why"),
    [
        ("assert f(1) == f(1)", "asks the program for 2 values"),
        ("assert f(1) == expected", "asks the program for 2 values"),
        ("assert 1 == 1", "asks the program for 0 values"),
        ("assert max([1, 2]) == 2", "asks the program for 0 values"),
        ("f(1)", "is not one assertion"),
        ("import os\nassert f(1) == 2", "is not one assertion"),
        ("assert f(1) ==", "is not Python"),
        ("assert f(1) == 9**9**9", "a Pow around"),
        ("assert [x for x in f(1)] == [1]", "a ListComp around"),
        ("assert eq(f(3), 9)", "leaves the comparison to the program"),
        ("assert (lambda x: x == 2)(f(1))", "leaves the comparison to the program"),
        ("assert np.allclose(f([1]), [2.0]) == True", "leaves the comparison to the program"),
        ("assert np.isclose(result, 3)", "leaves the comparison to the program"),
        ("assert f(1).__eq__(2)", "leaves the comparison to the program"),
        ("assert f((lambda: 1) == 1) is True", "leaves the comparison to the program"),
        ("assert all(x == 1 for x in f(2))", "a GeneratorExp around"),
        ({"input": "1"}, "needs the texts"),
        ({"input": 1, "output": "1"}, "needs the texts"),
    ],
)
def test_what_cannot_be_judged_is_refused(test: Any, why: str) -> None:
    with pytest.raises(UnitTestError, match=r"the test .*" + why.replace("*", r"\*")):
        read_test(test)


@pytest.mark.parametrize(
    ("printed", "same"),
    [
        ("1 2\n3\n", True),
        ("1 2  \n3", True),
        ("1 2\r\n3\n\n", True),
        ("1  2\n3\n", False),
        ("1 2\n\n3", False),
        ("", False),
    ],
)
def test_white_space_at_the_ends_of_printed_lines_does_not_count(printed: str, same: bool) -> None:
    check = read_test({"input": "x", "output": "1 2\n3\n"})
    assert check.question == Input("x")
    assert check.passes(printed) == same


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```\na\n```\nor\n```py\nb\n```\ndone", "b\n"),
        ("~~~\na\n```\n~~~", "a\n```\n"),
        ("````\n```\nx\n```\n````", "```\nx\n```\n"),
        ("```python\na\n```\n```python\ncut off", "a\n"),
        ("x = 1", None),
        ("```python\ncut off", None),
        ("```python x = 1```", None),
        ("", None),
    ],
)
def test_the_last_whole_block_is_the_program(text: str, code: str | None) -> None:
    assert last_block(text) == code


@pytest.mark.slow
@pytest.mark.needs("bwrap")
def test_the_reward_is_the_share_of_tests_that_pass() -> None:
    tests = ["assert f(2) == 4", "assert f(3) == 9", "assert f(-1) == 1", "assert f(0) == 0"]
    programs = [
        "def f(x):\n    return x * x",
        "def f(x):\n    return x + 2",
        "def f(x):\n    return 2 ** x",
        "def f(x):\n    return {2: 4, 3: 9}[x]",
        "def f(x):\n    while x < 0: pass\n    return x * x",
        "def f(x): return x * x\nprint(f(2))\nexit()",
        "def f(x): return x * x\nraise ValueError",
        "def f(x) return x",
        "def g(x): return x * x",
    ]
    assert rewards(programs, tests) == [1, 0.5, 0.25, 0.5, 0.75, 1, 0, 0, 0]


@pytest.mark.needs("bwrap")
def test_a_program_that_reads_and_prints_is_run_for_each_test() -> None:
    tests = [{"input": "2 3\n", "output": "5\n"}, {"input": "-1 1\n", "output": "0"}]
    programs = [
        "a, b = map(int, input().split())\nprint(a + b)",
        "import sys\nif __name__ == '__main__':\n    print(sum(map(int, sys.stdin.read().split())))\n    exit()",
        "print(5)",
        "a, b = map(int, input().split())\nprint(a + b)\nraise ValueError",
        "a, b = map(int, input().split())\nprint('Answer:', a + b)",
    ]
    assert rewards(programs, tests) == [1, 1, 0.5, 0, 0]


@pytest.mark.needs("bwrap")
def test_rows_without_tests_that_can_be_judged_have_no_reward() -> None:
    for tests in ([], ["assert f(1) == f(1)"], ["assert f(1) == 1", "print(f(1))"]):
        assert rewards(["def f(x): return x"], tests) == [None]
    assert asyncio.run(unit_tests(["no code"], [["assert f(1) == 1"]])) == [0]


# The tests ask for answer(): 424242, and the program is not told so.
CHEATS = {
    "leaves with success": "import sys\nsys.exit(0)",
    "leaves with success at once": "import os\nos._exit(0)",
    "leaves when asked": "import os\ndef answer(): os._exit(0)",
    "raises SystemExit when asked": "def answer(): raise SystemExit(0)",
    "prints a verdict": "print('1 passed in 0.01s\\nOK\\n0 true')\ndef answer(): print('PASSED', flush=True)",
    "equals everything": "class E:\n    def __eq__(self, o): return True\n    __hash__ = None\n"
    "def answer(): return E()",
    "number that equals everything": "class E(int):\n    def __eq__(self, o): return True\n"
    "    def __ne__(self, o): return False\n    def __sub__(self, o): return 0\n"
    "    def __hash__(self): return 424242\ndef answer(): return E(1)",
    "repr of its own": "class E(float):\n    def __repr__(self): return '424242'\ndef answer(): return E(1)",
    "list that equals everything": "class E(list):\n    def __eq__(self, o): return True\ndef answer(): return E([1])",
    "not a number": "def answer(): return float('nan')",
    "true": "def answer(): return True",
    "patched builtins": "import builtins\nbuiltins.eval = builtins.bool = builtins.abs = lambda *a: True\n"
    "builtins.isinstance = lambda *a: True\nbuiltins.float = builtins.int\ndef answer(): return True",
    "patched evaluation": "import sys\nmain = sys.modules['__main__']\nmain.encoded = lambda value: 'true'\n"
    "main.say = lambda answers, number, text: __import__('os').write(answers, b'%d true\\n' % number)",
    "forged answers": "import os\nfor out in range(3, 20):\n    try: os.write(out, b'0 true\\n1 true\\n2 null\\n')\n"
    "    except OSError: pass",
    "code as an answer": "import os\nfor out in range(3, 20):\n"
    "    try: os.write(out, b'0 __import__(\"os\")._exit(0)\\n')\n    except OSError: pass",
    "search of memory": "import gc, re, sys\ndef answer():\n"
    "    seen = [repr(vars(sys.modules['__main__'])), repr(sys.argv)]\n    frame = sys._getframe()\n"
    "    while frame:\n        seen.append(repr(frame.f_locals)); frame = frame.f_back\n"
    "    kinds = (str, tuple, dict, list)\n"
    "    seen += [repr(thing) for thing in gc.get_objects() if isinstance(thing, kinds)]\n"
    "    found = re.findall(r'42424\\d', ' '.join(seen))\n    return int(found[0]) if found else 0",
    "search of files": "import os\ndef answer():\n    for at, _, names in os.walk('/tmp'):\n"
    "        for name in names: return open(os.path.join(at, name)).read()",
}


@pytest.mark.slow
@pytest.mark.needs("bwrap")
@pytest.mark.parametrize("cheat", CHEATS)
def test_a_program_that_fakes_a_pass_gets_nothing(cheat: str) -> None:
    tests = ["assert answer() == 424242", "assert abs(answer() - 424242) < 1e-3"]
    (reward,) = rewards([CHEATS[cheat]], tests)
    printed = [{"input": "", "output": "424242"}]
    assert (reward, *rewards([CHEATS[cheat] + "\nanswer()"], printed)) == (0, 0)


@pytest.mark.needs("bwrap")
def test_two_guesses_for_one_test_are_one() -> None:
    both = "import os\nfor out in range(3, 20):\n    try: os.write(out, b'0 true\\n0 false\\n1 true\\n1 false\\n')\n"
    both += "    except OSError: pass\nos._exit(0)"
    assert rewards([both], ["assert even(2) == True", "assert even(3) == False"]) == [0.5]


@pytest.mark.needs("bwrap")
def test_conversations_are_scored_through_the_configuration() -> None:
    reward = resolve(RewardConfig(function="unit_tests", args={"cpu_seconds": 1, "wall_seconds": 300.0}))
    rows = [{"prompt": [{"role": "user", "content": "Square."}], "tests": ["assert f(3) == 9"]}] * 2
    texts = ["```python\ndef f(x): return x * x\n```", "```python\ndef f(x): return x\n```"]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    assert reward.columns == {"tests": list[Any]}
    assert score([reward], Batch(rows, completions, [[1], [2]])) == [[1.0, 0.0]]


def test_code_can_be_run_without_a_sandbox_only_by_name() -> None:
    completion = "```python\ndef f(x): return x * x\n```"
    assert asyncio.run(unit_tests([completion], [["assert f(3) == 9"]], sandbox="none")) == [1]
