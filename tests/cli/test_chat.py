"""`adapt chat`: scripted turns, commands, and a person at a terminal (pexpect)."""

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pexpect
import pytest

from adapt_llm.cli import services
from adapt_llm.cli.chat_commands import is_command
from adapt_llm.cli.chat_input import read_turn
from adapt_llm.cli.generation import Choices
from adapt_llm.errors import UsageError

REAL_OPTIONS = services.generation_options
Invoke = Callable[..., tuple[int, str, str]]


def test_scripted_turns_have_no_prompt(adapt: Invoke) -> None:
    assert adapt("chat", "b", stdin="hello\n\nand you?") == (0, "[1] hello \n[2] and you? \n", "")


def test_nothing_said(adapt: Invoke) -> None:
    assert adapt("chat", "b", stdin="") == (0, "", "")
    assert adapt("chat", "b", stdin="\n\n") == (0, "", "")


def test_system_and_exit(adapt: Invoke) -> None:
    assert adapt("chat", "b", "--system", "S", stdin="a\n/exit\nb\n") == (0, "S [1] a \n", "")
    for word in ("/quit", "/bye", "/EXIT"):
        assert adapt("chat", "b", stdin=f"{word}\nb\n") == (0, "", "")


def test_several_lines(adapt: Invoke) -> None:
    assert adapt("chat", "b", stdin='"""one\n/two\nthree"""\nfour\n')[1] == "[1] one /two three \n[2] four \n"
    assert adapt("chat", "b", stdin='"""never closed\nend')[1] == "[1] never closed end \n"
    assert adapt("chat", "b", stdin='"""one line"""\n')[1] == "[1] one line \n"


def test_lines_are_cut_at_newlines_only(adapt: Invoke) -> None:
    out = adapt("chat", "b", stdin="a\u2028b\r\nc\n")[1]
    assert out == "[1] a b \n[2] c \n"  # the fake joins words with spaces


def test_commands(adapt: Invoke, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    script = f"/system S\na\n/regen\n/save {saved}\n/clear\nb\n/load {saved}\nc\n/system\n/stats\n"
    code, out, err = adapt("chat", "b", stdin=script)
    assert code == 0
    assert out == "S [1] a \nS [1] a \nS [1] b \nS [2] c \n"
    assert err.startswith(
        "the system message holds from the next turn on\n"
        f"saved to {saved}\nforgotten\n1 turn from {saved}\nS\n"
        "7 prompt tokens, first token after 500 ms; 4 new tokens, 2.0 tokens/s\nmean depth 3.0 blocks\n"
    )
    assert json.loads(saved.read_text("utf-8"))["messages"][1] == {"role": "assistant", "content": "S [1] a "}
    assert adapt("chat", "b", "--load", saved, stdin="next\n")[1] == "S [2] next \n"


def test_help_names_every_command(adapt: Invoke) -> None:
    err = adapt("chat", "b", stdin="/help\n")[2]
    for name in ("/help", "/exit", "/clear", "/regen", "/save", "/load", "/system", "/set", "/stats", '"""'):
        assert f"\n{name}" in f"\n{err}"


def test_set(adapt: Invoke) -> None:
    code, out, err = adapt("chat", "b", stdin="/set max_tokens=2\none two three\n/set temp=0.5\n/set\n")
    assert (code, out) == (0, "[1] one \n")
    assert "max_tokens=2\ntemperature=0.5\n" in err


def test_choices() -> None:
    choices = Choices().set("max-tokens = 3").set("stop=\\n").set("ignore_eos=on").set("seed=7").set("top_k=40")
    assert (choices.max_tokens, choices.stop, choices.ignore_eos, choices.seed, choices.top_k) == (
        3,
        ("\n",),
        True,
        7,
        40,
    )
    assert choices.set("max_tokens=none").max_tokens is None
    assert choices.set("stop=").stop == ()
    for bad in ("temperature", "temperature=hot", "colour=1", "=1", "ignore_eos=perhaps"):
        with pytest.raises(UsageError):
            choices.set(bad)


@pytest.mark.parametrize(
    "choices", [Choices(), Choices(max_tokens=3, seed=7, stop=("\n",), ignore_eos=True, min_p=0.1)]
)
def test_choices_are_shown_as_they_are_set(choices: Choices) -> None:
    read = Choices()
    for line in choices.lines():
        read = read.set(line)
    assert read == choices


@pytest.mark.parametrize(
    ("script", "code", "line"),
    [
        ("/nonsense\nb\n", 2, "there is no command /nonsense. See /help; begin with a space to say it to the model"),
        (
            "/usr/bin/env python\n",
            2,
            "there is no command /usr/bin/env. See /help; begin with a space to say it to the model",
        ),
        ("/regen\n", 2, "There is no answer to make again. Say something first."),
        ("/save\n", 2, "/save needs a file name"),
        ("/stats\n", 2, "nothing was answered yet"),
        ("/set x=1\n", 2, None),
        ("FAIL\nb\n", 1, "The prompt does not fit. Shorten it."),
    ],
)
def test_a_script_stops_at_an_error(adapt: Invoke, script: str, code: int, line: str | None) -> None:
    exit_code, out, err = adapt("chat", "b", stdin=script)
    assert (exit_code, out) == (code, "")
    assert err.count("\n") == 1
    if line is not None:
        assert err == f"adapt: error: {line}\n"


@pytest.mark.parametrize("before", ["", "hi\n"])
@pytest.mark.parametrize("after", ["", "hi\n"])
@pytest.mark.parametrize(
    "setting",
    ["temperature=nan", "temperature=-1", "top_p=5", "top_k=-1", "min_p=inf", "repeat_penalty=0", "max_tokens=0"],
)
def test_an_impossible_setting_is_refused_where_it_stands(
    adapt: Invoke, monkeypatch: pytest.MonkeyPatch, setting: str, before: str, after: str
) -> None:
    """A script's error is one whether or not a turn follows it."""
    fake = services.generation_options

    def checked(choices: Choices, *, row: int = 0) -> object:
        REAL_OPTIONS(choices, row=row)
        return fake(choices, row=row)

    monkeypatch.setattr(services, "generation_options", checked)
    code, out, err = adapt("chat", "b", stdin=f"{before}/set {setting}\n{after}")
    assert (code, out, err.count("\n")) == (2, "[1] hi \n" if before else "", 1)


def test_a_space_makes_it_a_prompt(adapt: Invoke) -> None:
    assert adapt("chat", "b", stdin=" /usr/bin/env python\n") == (0, "[1] /usr/bin/env python \n", "")
    assert not is_command("/")
    assert not is_command("/ 2 is a half")
    assert is_command("/x")


def test_dropped_turns_are_said(adapt: Invoke) -> None:
    err = adapt("chat", "b", stdin="a\nb\nc\nd\n")[2]
    assert err == "adapt: warning: the oldest 1 turns no longer fit in the context and are left out\n"
    assert adapt("chat", "b", "-q", stdin="a\nb\nc\nd\n")[2] == ""


def test_base_model(adapt: Invoke) -> None:
    code, out, err = adapt("chat", "base", stdin="a\n")
    assert (code, out) == (1, "")
    assert err == (
        "adapt: error: base has no chat template: it is a base model. Give one with --chat-template, or --raw.\n"
    )
    assert adapt("chat", "base", "--raw", stdin="a\n")[0] == 0
    assert adapt("chat", "base", "--chat-template", "chatml", stdin="a\n")[0] == 0


def test_undecodable_turn(adapt: Invoke) -> None:
    code, out, err = adapt("chat", "b", stdin=b"ok\n\xb3\xaa\n")
    assert (code, out) == (1, "[1] ok \n")
    assert err == "adapt: error: stdin is not UTF-8 text (byte 0 of a line)\n"


def test_read_turn_asks_with_the_right_prompt() -> None:
    class Script:
        interactive = True

        def __init__(self, lines: list[str]) -> None:
            self.lines, self.prompts = lines, []

        def read(self, prompt: str) -> str:
            self.prompts.append(prompt)
            return self.lines.pop(0)

    script = Script(['  """a', "b", 'c"""'])
    assert read_turn(script) == "a\nb\nc"
    assert script.prompts == [">>> ", "... ", "... "]


# --- at a terminal


@contextmanager
def terminal(program: list[str], *args: str) -> Iterator["pexpect.spawn[str]"]:
    child = pexpect.spawn(program[0], [*program[1:], *args], encoding="utf-8", timeout=20, env={**ENVIRONMENT})
    try:
        yield child
    finally:
        child.close(force=True)


ENVIRONMENT = {
    "TERM": "xterm",
    "PATH": "/usr/bin:/bin",
    "NO_COLOR": "1",
    "PROMPT_TOOLKIT_NO_CPR": "1",
    "LC_ALL": "C.UTF-8",
}


def ended(child: "pexpect.spawn[str]") -> int | None:
    child.expect(pexpect.EOF)
    child.close()
    return child.exitstatus


def test_terminal_turns_and_ctrl_d(program: list[str]) -> None:
    with terminal(program, "chat", "b") as child:
        child.expect(">>>")
        child.send("안녕 👋\r")
        child.expect(r"\[1\] 안녕 👋 ")
        child.expect(">>>")
        child.send("/nonsense\r")
        child.expect("adapt: error: there is no command /nonsense")
        child.expect(">>>")
        child.sendeof()
        assert ended(child) == 0


def test_ctrl_c_stops_the_answer_and_keeps_it(program: list[str], tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    with terminal(program, "chat", "b") as child:
        child.expect(">>>")
        child.send("SLOW 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20\r")
        child.expect(r"\[1\] SLOW 1 ")
        child.sendintr()
        child.expect(">>>")
        child.send(f"/save {saved}\r")
        child.expect("saved to")
        child.expect(">>>")
        child.send("on we go\r")
        child.expect(r"\[2\] on we go")
        child.expect(">>>")
        child.sendintr()
        assert ended(child) == 130
    kept = json.loads(saved.read_text("utf-8"))["messages"]
    assert kept[0]["role"] == "user"
    assert kept[1]["content"].startswith("[1] SLOW 1 ")
    assert "20" not in kept[1]["content"]


def test_ctrl_c_clears_a_line_with_text(program: list[str]) -> None:
    with terminal(program, "chat", "b") as child:
        child.expect(">>>")
        child.send("half a though")
        child.expect("half a though")
        child.sendintr()
        child.send("whole\r")
        child.expect(r"\[1\] whole ")
        child.sendintr()
        assert ended(child) == 130


def test_ctrl_c_in_run(program: list[str]) -> None:
    with terminal(program, "run", "b", "SLOW a b c d e f g h i j k l m n o p") as child:
        child.expect("SLOW a ")
        child.sendintr()
        assert ended(child) == 130
        assert "Traceback" not in (child.before or "")


def test_chat_into_a_pipe_keeps_stdout_clean(program: list[str]) -> None:
    run = subprocess.run([*program, "chat", "b"], input="hi\n", capture_output=True, text=True, check=True)
    assert (run.stdout, run.stderr) == ("[1] hi \n", "")
