"""Commands of a shell script as bash would run them: each case was compared with bash itself."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from grpo_core.planning.frameworks.shell import ShellError, commands

SCRIPT = r"""
TEXT="it's one # text
of two lines"
export G=4 NAME='a "b"'; LIST=(--first 1   # of an array
  --second "two words")
FOLDER="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cat > /dev/null <<'END'
don't read "this
END
B=2 show "$TEXT" --g $G ${G} "${NAME}" "${LIST[@]}" "${A:-8}" x#y "" \
  'p'"q"r\ s "$@" 2>&1 > /dev/null | cat   # a comment: it's not read
if true; then show in "$G"; fi; show a && show b; false || show c
K=4; K+=2; L=(a); L+=(b "c d"); (K=9; show sub $K); show $K "${L[@]}"
if true; then K=5; show in $K; fi
show "p1"\
"p2" $LIST
"""

EXPANSIONS = r"""
N=4 E= F=1 KEY=b I=2
DATA=${DATA:-"${E:-/home}/data"}; show $DATA "$DATA"
B=${B:-"x y"}; show $B "$B" ${Z:-"a b"} ${Z:-a b} "${Z:-a b}" ${Z:-'a b'} "${Z:-'a b'}" "${Z:-"a b"}" ${Z:-"a b" c d}
show "${A:-${D:-2}}" ${A:-${D:-${C:-"7 8"}}} "${V:-
two lines}" "${X:-$N}}" "${X:-a\}b}" ${X:-a\ b} ${X:-"a"b} ${X:-a"b c"d} ${X:-} "${X:-}" ${X:-""}
show $((1+1)) "$((2 * 3))" "$(( (2+3)*4 - 7/2 ))" $((7%3)) $((-7/2)) $((-7%3)) $((N*2)) $((${N} + ${M:-3})) x$((N+1))y
show "${N:-"$((N+1))"}" "${O:-$((N*3))}"
declare -A MAP=([a]=1 [b]="2 3"); show ${MAP[$KEY]:-8} "${MAP[$KEY]:-8}" "${MAP[c]:-8}" ${MAP["a"]} ${NOMAP[$KEY]:-8}
declare -A MORE; MORE[x]=5; MORE["y z"]=6; show ${MORE[x]} "${MORE[y z]}" ${MORE[q]:-9}
LIST=(a "b c" d); show ${LIST[1]} "${LIST[1]}" "${LIST[0]}" "${LIST[$I]}" ${LIST[5]:-none}
show "${E:-1}" "${E-1}" [${E:+x}] [${E+x}] "${F:+yes $F}" ${F:+yes $F} ${X:+no} end ${G:=5} $G "${G:=6}"
args=(--processes 8 "my grpo.py"); args+=(--x "${Q:-"1 2"}"); show torchrun "${args[@]}"
T="2 + 3" U=-3; show $((T * 2)) $(($T * 2)) $((2 * T)) $((10 - U)) $((10 - T))
show "${R:-(a; b) | c > d}" "it's \"quoted\" \$N \\ \a"
"""


@pytest.mark.parametrize("script", [SCRIPT, EXPANSIONS])
def test_words_are_those_that_bash_gives_a_program(tmp_path: Path, script: str) -> None:
    program = tmp_path / "show"
    program.write_text(f'#!/bin/bash\nprintf "%s\\0" "$@" END >> {tmp_path}/seen\n')
    program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    subprocess.run(["bash", "-c", script], env=environment, cwd=tmp_path, check=True)
    said = (tmp_path / "seen").read_text().split("END\0")[:-1]
    theirs = [text.split("\0")[:-1] for text in said]
    ours = [command.words[1:] for command in commands(script) if command.words[0] == "show"]
    assert len(theirs) > 8
    assert ours == theirs


def test_environment_is_what_the_script_sets_before_and_in_front() -> None:
    [first, second] = commands("export A=1\nB=2 swift rlhf\nC=3\nB=${B:-7} swift rlhf --b $B\n")
    assert first.environment == {"A": "1", "B": "2"}
    assert second.environment == {"A": "1", "C": "3", "B": "7"}
    assert second.words == ["swift", "rlhf", "--b", "$B"]


def test_the_script_s_own_folder_is_the_folder_it_stands_in() -> None:
    for folder in ('"$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"', '$(dirname "$0")'):
        [command] = commands(f'HERE={folder}\nrun --config "$HERE/x.yaml"')
        assert command.words[-1] == "./x.yaml"


def test_what_a_reader_is_to_fill_in_is_a_word() -> None:
    [command] = commands("run --host <first-ip> <second-ip> \\\n --port 8000")
    assert command.words == ["run", "--host", "<first-ip>", "<second-ip>", "--port", "8000"]


@pytest.mark.parametrize("head", ["f() {", "f()\n{", "function f {", "function f() {", "function f\n{"])
def test_arguments_of_a_function_are_not_known_and_those_of_the_script_are_none(head: str) -> None:
    *_, inside, outside = commands(f'{head}\nrun $1 "${{2:-5}}" "$@"\n}}\nrun ${{1:-5}} "$@"')
    assert inside.words == ["run", "$1", "$2", "$@"]
    assert outside.words == ["run", "5"]


def test_arithmetic_that_bash_reads_otherwise_stands_as_it_is() -> None:
    texts = ["$((010))", "$((2**3))", "$((N++))", "$((1/0))", "$((9999999999 * 9999999999))", "$((UNSET + 1))"]
    [command] = commands("run " + " ".join(texts))
    assert command.words[1:] == texts


def test_a_bracket_that_is_never_closed_is_named() -> None:
    with pytest.raises(ShellError, match=r"a bracket is never closed: \{A:-1"):
        list(commands("run ${A:-1 b"))


@pytest.mark.parametrize("script", ["run 'x", 'run "x', "run `x", 'run "' + "$(a)" * 200])
def test_a_quote_that_is_never_closed_is_named(script: str) -> None:
    with pytest.raises(ShellError, match="a quote is never closed"):
        list(commands(script))


@pytest.mark.parametrize(
    "line",
    [
        "x && G=(8)",
        "if x; then G+=(8); fi",
        "G[0]+=8",
        "if x; then G=8; else G=9; fi",
        "case x in a) G=8;; esac",
        "for i in 1; do G=8; done",
        "x && G=8",
        "read G",
        "unset G\n    ",
        "for G in 8 9; do x; done",
        "f() { G=8; }",
        "function f {\nG=8\n}",
        "eval G=8",
        "eval 'F=1; export G=8'",
        "declare -i G=8",
        "let G=8",
        "let i=2 G*=i",
        'let "i = 2, G *= i"',
        "((G *= 2))",
        "(( G++ ))",
        "((++G))",
        "(( i = (1 + 2) * 2, G <<= i ))",
        "x && ((G = 8))",
        "if ((G -= 1)); then x; fi",
        "while (( G-- )); do x; done",
        "for ((G = 0; G < 3; G++)); do x; done",
        "for (( i = 0; i < 3; i++ )); do ((G *= 2)); done",
        "x $((G *= 2))",
        ": $(( G++ ))",
        "printf -v G %d 8",
    ],
)
def test_a_value_that_depends_on_what_happens_is_not_known(line: str) -> None:
    *_, last = commands(f"G=4\n{line}\nrun $G ${{G:-2}}")
    assert last.words == ["run", "$G", "$G"]
    assert last.environment["G"] == "$G"


@pytest.mark.parametrize("line", ["((G == 4)) && x", "if (( G >= 3 && G != 5 )); then x; fi", "let 'G <= 4'"])
def test_arithmetic_that_only_compares_keeps_a_value(line: str) -> None:
    *_, last = commands(f"G=4\n{line}\nrun $G")
    assert last.words == ["run", "4"]


@pytest.mark.parametrize("script", ["A=xx\n" + "A=$A$A\n" * 39, "A=(x)\n" + "A=(${A[@]} ${A[@]})\n" * 30])
def test_a_variable_that_grows_without_bounds_is_refused(script: str) -> None:
    with pytest.raises(ShellError, match="grows beyond"):
        list(commands(script))
