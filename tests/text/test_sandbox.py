"""Templates and tokenizers that do not end, take all memory, or make their library give up: each costs a sentence."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.messages import ChatMessage
from engine.models.errors import ModelLoadError
from engine.request import RequestError
from engine.text.codec import TextCodec
from engine.text.sandbox import BoundedEnvironment, TemplateLimitError
from engine.text.template import ChatTemplate
from tests.text.tiny_tokenizers import byte_level, save


def rendered(template: str, seconds: float = 0.2, **values: Any) -> str:
    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True)
    return environment.run(environment.from_string(template), values, seconds)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% for a in range(99999) if a > 99998 %}{% for b in range(99999) %}{{ b }}{% endfor %}{% endfor %}" * 99,
    ],
)
def test_what_does_not_end_is_stopped(template: str) -> None:
    begin = time.thread_time()
    with pytest.raises(TemplateLimitError, match="does not end"):
        rendered(template)
    assert time.thread_time() - begin < 2


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 4000000000 }}",
        "{{ 4000000000 * 'a' }}",
        "{{ ([0] * 400000000) | length }}",
        "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x=9) %}{% for i in range(40) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ 'a' | center(2000000000) }}",
        "{{ 'a' | indent(width=2000000000, first=true) }}",
        "{{ 'a'.ljust(2000000000) }}",
        "{{ '%02000000000d' % 1 }}",
        "{{ '%02000000000d' | format(1) }}",
        "{{ '{:>2000000000}'.format(1) }}",
        "{% set x = 'a' * 1000000 %}{% for a in range(20) %}{{ x }}{% endfor %}",
    ],
)
def test_what_grows_without_end_is_stopped_before_it_does(template: str) -> None:
    with pytest.raises(TemplateLimitError):
        rendered(template, seconds=10)


def test_ordinary_templates_write_what_they_write_in_jinjas_own_sandbox() -> None:
    template = """
    {%- for key, value in {'a': 1, 'b': [2, 3]}.items() %}{{ loop.index }}/{{ loop.length }} {{ key ~ '=' ~ value }}
    {%- if not loop.last %}, {% endif %}{% endfor %}
    {%- for x in nothing %}never{% else %}none{% endfor %}
    {%- for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}
    {%- for x in 'abc' if x != 'b' %}{{ x }}{{ loop.nextitem }}{% endfor %}
    {{- 'x' * 3 + 'y' }}{{ '%s-%05d' % ('a', 7) }}{{ '{:>5}'.format('r') }}{{ 2 ** 10 }}{{ [1] + [2] }}
    {{- messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join(', ') }}
    {{- 'a\nb' | indent(2) }}{{ undefined_thing ~ none ~ 1.5 }}"""
    values = {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]}
    own = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    assert rendered(template, **values) == own.from_string(template).render(values)


def test_a_template_without_end_is_refused_at_load_or_costs_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    monkeypatch.setattr("engine.text.template._PROBE_SECONDS", 0.1)
    monkeypatch.setattr("engine.text.template._SECONDS", 0.1)
    with pytest.raises(ModelLoadError, match=r"The model's chat template does not end.*0\.1 seconds\.$") as refused:
        ChatTemplate(endless, {}, ())
    assert refused.value.kind == "damaged"
    later = "{{ messages[0].content }}{% if messages[0].content == 'go' %}" + endless + "{% endif %}"
    template = ChatTemplate(later, {}, ())
    with pytest.raises(RequestError, match="does not end"):
        template.render([ChatMessage("user", "go")])
    assert template.render([ChatMessage("user", "stay")]).text == "stay"


@pytest.mark.parametrize("source", ["x" * 2_000_000, "{% if 1 %}" * 900 + "{% endif %}" * 900])
def test_sources_that_are_no_template_are_refused(source: str) -> None:
    with pytest.raises(ModelLoadError, match="The model's chat template"):
        ChatTemplate(source, {}, ())


# Tokenizers ----------------------------------------------------------------------------------------------------------


def changed(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    save(folder, byte_level())
    definition = json.loads((folder / "tokenizer.json").read_text())
    change(definition)
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    return folder


def added(content: str) -> Callable[[dict[str, Any]], None]:
    def change(definition: dict[str, Any]) -> None:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        token = {"id": 10_000, "content": content, "special": True, **flags}
        definition["added_tokens"].append(token)

    return change


def test_a_control_token_of_nothing_is_nowhere(tmp_path: Path) -> None:
    plain = TextCodec.from_folder(save(tmp_path / "plain", byte_level()))
    odd = TextCodec.from_folder(changed(tmp_path / "odd", added("")))
    conversation = [ChatMessage("user", "hi é\n <|im_end|> x")]
    assert odd.encode_chat(conversation) == plain.encode_chat(conversation)


def test_a_control_token_of_a_books_length_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="100,000 characters") as refused:
        TextCodec.from_folder(changed(tmp_path / "odd", added("x" * 100_000)))
    assert len(refused.value.message) < 300


def test_a_library_that_gives_up_while_loading_is_a_damaged_tokenizer(tmp_path: Path) -> None:
    normalizer = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    folder = changed(tmp_path / "odd", lambda definition: definition.update(normalizer=normalizer))
    with pytest.raises(ModelLoadError, match="charsmap") as refused:
        TextCodec.from_folder(folder)
    assert refused.value.kind == "damaged"


def test_a_library_that_gives_up_on_a_text_costs_that_text(tmp_path: Path) -> None:
    pre_tokenizer = {"type": "FixedLength", "length": 0}
    folder = changed(tmp_path / "odd", lambda definition: definition.update(pre_tokenizer=pre_tokenizer))
    with pytest.raises(RuntimeError, match="gave up"):
        TextCodec.from_folder(folder).encode("some text")


@pytest.mark.parametrize("content", ["[]", "{", "5", "[" * 100_000, '{"bos_token": "\\ud800"}'])
def test_a_damaged_tokenizer_config_is_named(tmp_path: Path, content: str) -> None:
    folder = save(tmp_path / "odd", byte_level())
    (folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json") as refused:
        TextCodec.from_folder(folder)
    assert refused.value.kind == "damaged"
