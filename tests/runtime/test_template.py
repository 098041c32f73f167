"""Rendering against transformers, the sandbox, and what is said when there is no template."""

import json
from pathlib import Path

import pytest

from adapt_llm.errors import AdaptError, FormatError, UnsupportedError, UsageError
from adapt_llm.runtime.chat_formats import BUILT_IN
from adapt_llm.runtime.template import Template

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "안녕 <b>"}
ANSWER = {"role": "assistant", "content": "Hi."}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def folder_with(folder: Path, template: object) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}), encoding="utf-8")
    return folder


def load(folder: Path, choice: str | None = None, *, adds_bos: bool = True) -> Template:
    return Template.from_folder(folder, choice, special_tokens=TOKENS, adds_bos=adds_bos)


def test_a_base_model_is_told_plainly_with_what_can_be_done(tmp_path: Path) -> None:
    with pytest.raises(AdaptError, match="base model") as caught:
        load(tmp_path)
    assert "--chat-template" in caught.value.hint
    assert "--raw" in caught.value.hint
    assert "chatml" in caught.value.hint


def test_places_a_template_can_come_from_in_order(tmp_path: Path) -> None:
    folder_with(tmp_path, [{"name": "default", "template": "D"}, {"name": "rag", "template": "R"}])
    assert load(tmp_path).render([USER]) == "D"
    assert load(tmp_path, "rag").render([USER]) == "R"
    (tmp_path / "chat_template.jinja").write_text("F", encoding="utf-8")
    assert load(tmp_path).render([USER]) == "F"
    own = tmp_path / "mine.jinja"
    own.write_text("M {{ bos_token }}", encoding="utf-8")
    assert load(tmp_path, str(own)).render([USER]) == "M <s>"
    folder_with(tmp_path, "S")
    (tmp_path / "chat_template.jinja").unlink()
    assert load(tmp_path).render([USER]) == "S"


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="alpaca, chatml, gemma, llama3, mistral, plain"):
        load(tmp_path, "chatmll")


def test_built_in_formats_word_for_word(tmp_path: Path) -> None:
    rendered = {name: load(tmp_path, name).render([SYSTEM, USER, ANSWER, USER]) for name in BUILT_IN}
    assert rendered == {
        "chatml": "<s><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n안녕 <b><|im_end|>\n"
        "<|im_start|>assistant\nHi.<|im_end|>\n<|im_start|>user\n안녕 <b><|im_end|>\n<|im_start|>assistant\n",
        "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n안녕 <b><|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHi.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n안녕 <b><|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "gemma": "<s><start_of_turn>user\nBe brief.\n\n안녕 <b><end_of_turn>\n<start_of_turn>model\nHi.<end_of_turn>\n"
        "<start_of_turn>user\n안녕 <b><end_of_turn>\n<start_of_turn>model\n",
        "mistral": "<s>[INST] Be brief.\n\n안녕 <b> [/INST] Hi.</s>[INST] 안녕 <b> [/INST]",
        "alpaca": "<s>Be brief.\n\n### Instruction:\n안녕 <b>\n\n### Response:\nHi.\n\n"
        "### Instruction:\n안녕 <b>\n\n### Response:\n",
        "plain": "<s>Be brief.\n\nUser: 안녕 <b>\nAssistant: Hi.\nUser: 안녕 <b>\nAssistant:",
    }


def test_built_in_formats_write_no_bos_where_the_tokenizer_uses_none(tmp_path: Path) -> None:
    for name in BUILT_IN:
        assert "<s>" not in load(tmp_path, name, adds_bos=False).render([USER])


def test_built_in_formats_know_what_ends_an_answer_without_such_a_token(tmp_path: Path) -> None:
    assert load(tmp_path, "plain").stops == ("\nUser:",)
    assert all(load(tmp_path, name).stops for name in BUILT_IN)


@pytest.mark.parametrize(
    "source",
    [
        (
            "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
            "[{{ m.content }}]{% endfor %}"
        ),
        "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]{% endif %}{% endfor %}",
    ],
    ids=["refuses", "drops"],
)
def test_a_system_message_the_template_cannot_place_goes_into_the_first_user_turn(source: str) -> None:
    template = Template(source)
    assert template.render([SYSTEM, USER]) == "[Be brief.\n\n안녕 <b>]"
    assert template.render([USER]) == "[안녕 <b>]"
    assert template.render([SYSTEM]) in ("[Be brief.]",)


def test_helpers_are_those_of_transformers() -> None:
    template = Template(
        "{% for m in messages %}{% if loop.index0 > 0 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}"
        "{% generation %}G{% endgeneration %}{{ strftime_now('%Y') | length }}"
        "{% set ns = namespace(x=1, self=2) %}{% set ns.x = 5 %}{{ ns.x }}{{ dict(a=1).a }}"
    )
    assert template.render([USER, USER]) == '{"role": "user", "content": "안녕 <b>"}G451'


def test_render_passes_variables_and_joins_text_parts() -> None:
    template = Template("{{ messages[0].content }}{{ enable_thinking }}{{ tools }}{{ add_generation_prompt }}")
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert template.render([parts], enable_thinking=False, add_generation_prompt=False) == "abFalseNoneFalse"
    with pytest.raises(UnsupportedError, match="image_url"):
        template.render([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}])


def test_a_broken_template_is_one_line_with_the_line_number(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="line 2") as caught:
        load(folder_with(tmp_path, "ok\n{% for %}"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('roles must\nalternate.') }}", "roles must alternate"),
        ("{{ messages[0]['content'] + 1 }}", "concatenate"),
        ("{{ nothing.there }}", "nothing"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ namespace(_x=1) }}", "namespace"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", "namespace"),
        ("{{ dict.__globals__.x }}", "unsafe"),
        ("{{ range(10**9) | list }}", "(?i)range"),
    ],
)
def test_a_refusal_or_a_crash_inside_a_template_is_one_line(source: str, says: str) -> None:
    with pytest.raises(AdaptError, match=says) as caught:
        Template(source).render([USER])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% if 1 %}" * 600 + "x" + "{% endif %}" * 600,
        "{% for a in [1] %}" * 30 + "x" + "{% endfor %}" * 30,
        "{{ " + "not " * 50_000 + "1 }}",
        "{{ (10**5000)|string }}",
        "{{ " + "9" * 5000 + " }}",
        "{{ messages|nosuch }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ '\\ud800' }}",
        "\ud800",
        "{{ raise_exception('\\ud800') }}",
        "{{ raise_exception('long ' * 10000) }}",
        "{{ strftime_now('\\ud800') }}",
        "{{ '%999999999999999999999d' % 1 }}",
        "{{ messages[0].content * 10**15 }}",
        "{% for i in range(1000) %}{{ 'a' * 100000 }}{% endfor %}",
        "{{ lipsum(n=3) }}",
        "{% include 'x' %}",
    ],
    ids=lambda source: ascii(source[:40]),
)
def test_whatever_a_template_does_is_one_line_of_text(source: str, tmp_path: Path) -> None:
    """It is untrusted: it may nest beyond Python's limits, write half a character, and write without end."""
    given = tmp_path / "given.jinja"
    given.write_text(source, encoding="utf-8", errors="surrogatepass")

    def from_file() -> str:
        return load(tmp_path, str(given)).render([USER])

    for render in (lambda: Template(source).render([USER]), from_file):
        with pytest.raises(AdaptError) as caught:
            render()
        said = str(caught.value)
        assert said.isprintable()
        assert len(said) < 1000


def test_rendering_agrees_with_transformers(tmp_path: Path) -> None:
    compile_template = pytest.importorskip("transformers.utils.chat_template_utils")._compile_jinja_template
    source = (
        "{%- for m in messages %}\n    {%- if not loop.first %}\n\n{% endif %}\n"
        "  {{- '<' + m.role + '>' }}\n  {{ m.content | trim }}\n{%- endfor %}\n"
        "{% if add_generation_prompt %}<a>{% endif %}\n"
    )
    messages = [SYSTEM, USER, ANSWER, {"role": "user", "content": " x \n"}]
    for prompt in (True, False):
        expected = compile_template(source).render(messages=messages, add_generation_prompt=prompt)
        assert Template(source).render(messages, add_generation_prompt=prompt) == expected
