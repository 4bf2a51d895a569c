"""Chat templates are untrusted programs: what they may compute is bounded, and what published ones write is not
changed.
"""

import time
from collections.abc import Sequence

import pytest

from foretell.tokenizer import chat_template
from foretell.tokenizer.chat_template import MAX_TEMPLATE_CHARS, ChatTemplate

USER = {"role": "user", "content": "Why?"}
DOUBLING = "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = VALUE %}{% endfor %}{{ n.x }}"
LARGE = "{% set x = 'a' * 99999 %}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**10 }}",
        "{{ 10**10 * 'a' }}",
        "{{ [1] * 10**10 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ 10**10 * 'a' ~ 'b' }}",
        DOUBLING.replace("VALUE", "n.x + n.x"),
        DOUBLING.replace("VALUE", "n.x ~ n.x"),
        DOUBLING.replace("VALUE", "[n.x, n.x]"),
        DOUBLING.replace("VALUE", "(n.x, n.x)"),
        DOUBLING.replace("VALUE", "{'a': n.x, 'b': n.x}"),
        DOUBLING.replace("VALUE", "dict(a=n.x, b=n.x)"),
        DOUBLING.replace("VALUE", "n.x.replace('a', 'aa')"),
        "{{ 'a'.ljust(10**10) }}",
        "{{ 'a'|center(10**10) }}",
        "{{ ('a'|attr('zfill'))(10**10) }}",
        "{{ '\\t'.expandtabs(10**10) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '%9999999999d'|format(1) }}",
        "{{ '{:9999999999}'.format(1) }}",
        "{{ '{:{w}}'.format(1, w=10**9) }}",
        LARGE + "{{ ('{0}' * 99999).format(x) }}",
        LARGE + "{{ x.replace('a', x) }}",
        LARGE + "{{ x|replace('', x) }}",
        LARGE + "{{ x.join(x) }}",
        LARGE + "{{ x|join(x) }}",
        LARGE + "{{ range(9999)|map('replace', '9', x)|list }}",
        LARGE + "{{ (x|replace('a', 'a\\n'))|indent(x) }}",
        LARGE + "{% macro f() %}{{ varargs|string }}{% endmacro %}{{ f(x,x,x,x,x,x,x,x,x,x,x,x) }}",
        "{{ 'a'|indent(10**10) }}",
        "{{ 1|round(10**10) }}",
        "{{ [1]|slice(10**9)|list }}",
        "{{ 1.to_bytes(10**10, 'big') }}",
        "{{ [[1]]|sum(start=[]) }}",
        "{% for i in range(99999) %}" + "a" * 200 + "{% endfor %}",
        "{% for i in range(99999) %}{% set x %}" + "a" * 9999 + "{% endset %}{% endfor %}",
    ],
)
def test_no_template_makes_a_large_value(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_VALUE_BYTES", 1 << 17)
    started = time.process_time()
    with pytest.raises(ValueError, match=r"the chat template was stopped: (it|the filter)") as error:
        ChatTemplate(source).render([USER])
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
    assert time.process_time() - started < 5


ENDLESS = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for i in range(9) recursive %}{% if loop.depth < 9 %}{{ loop(range(99999)) }}{% endif %}{% endfor %}",
    "{% for i in range(99999)|select('in', range(9999)|map('string')|list) %}{{ range(99999)|map('int')|list }}{% "
    "endfor %}",
    "{% for i in range(99999) if range(99999)|map('string')|list|length == 1 %}{% endfor %}",
)


@pytest.mark.parametrize("source", ENDLESS)
def test_a_template_that_does_not_end_is_stopped_by_its_steps(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_STEPS", 3000)
    with pytest.raises(ValueError, match=r"the chat template was stopped: it makes (more loop|a value|more values)"):
        ChatTemplate(source).render([USER])


def test_a_template_that_does_not_end_is_stopped_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.05)
    with pytest.raises(ValueError, match="the chat template was stopped: it takes more than"):
        ChatTemplate(ENDLESS[0]).render([USER])


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**12) %}{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{{ none.x.y }}",
        "{{ lipsum(n=10**9) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% include 'x' %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'x'|nosuch }}",
        "{% if %}",
        "{{ " + "(" * 5000,
        "{% if 1 %}" * 3000,
        "{{ " + "9" * 9999 + " }}",
        "{% for i in [1] %}" * 30 + "{% endfor %}" * 30,
        "a" * (MAX_TEMPLATE_CHARS + 1),
        "{{ raise_exception('long ' * 1000) }}",
    ],
)
def test_whatever_a_template_raises_is_one_sentence(source: str) -> None:
    with pytest.raises(ValueError, match=r"^the chat template ") as error:
        ChatTemplate(source).render([USER])
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    "+ message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + message["content"]|trim + eos_token }}
    {%- endif %}
{%- endfor %}"""
GEMMA_3 = """{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}{%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'assistant') -%}{%- set role = "model" -%}
    {%- else -%}{%- set role = message['role'] -%}{%- endif -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}{%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}{{ item['text'] | trim }}{%- endfor -%}
    {%- else -%}{{ raise_exception("Invalid content type") }}{%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{'<start_of_turn>model\n'}}{%- endif -%}"""
QWEN_3 = """{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string
        and not(message.content.startswith('<tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role != "assistant" %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- else %}
        {%- set content, reasoning_content = message.content, '' %}
        {%- if '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and reasoning_content %}
            {{- '<|im_start|>assistant\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n'
                + content + '<|im_end|>\n' }}
        {%- else %}
            {{- '<|im_start|>assistant\n' + content + '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}"""
SYSTEM, ANSWER = (
    {"role": "system", "content": "Be brief."},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nSo. "},
)
AGAIN = {"role": "user", "content": ' "é" \n'}


@pytest.mark.parametrize(
    ("source", "messages", "text"),
    [
        (
            CHATML,
            [USER, ANSWER],
            "<|im_start|>user\nWhy?<|im_end|>\n"
            "<|im_start|>assistant\n<think>\nhm\n</think>\n\nSo. <|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            LLAMA_3,
            [SYSTEM, AGAIN],
            "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
            '<|start_header_id|>user<|end_header_id|>\n\n"é"<|eot_id|>'
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            MISTRAL,
            [SYSTEM, USER, ANSWER, AGAIN],
            '<s>[INST] Why?[/INST] <think>\nhm\n</think>\n\nSo.</s>[INST] Be brief.\n\n "é" \n[/INST]',
        ),
        (
            GEMMA_3,
            [SYSTEM, USER, ANSWER, AGAIN],
            "<s><start_of_turn>user\nBe brief.\n\nWhy?<end_of_turn>\n"
            "<start_of_turn>model\n<think>\nhm\n</think>\n\nSo.<end_of_turn>\n"
            '<start_of_turn>user\n"é"<end_of_turn>\n<start_of_turn>model\n',
        ),
        (
            QWEN_3,
            [USER, ANSWER, AGAIN],
            "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\nSo. <|im_end|>\n"
            '<|im_start|>user\n "é" \n<|im_end|>\n<|im_start|>assistant\n',
        ),
        (
            "{{ messages|tojson }}{{ '%s:%d'|format('a', 7) }}{{ '{}-{:.2f}'.format('b', 0.5) }}"
            "{{ 'c'.center(5) }}{{ '-' * 4 }}",
            [USER],
            '[{"role": "user", "content": "Why?"}]a:7b-0.50  c  ----',
        ),
        (
            "{{ messages|map(attribute='role')|join(', ') }}{{ 'a b'.replace(' ', '_') }}"
            "{{ ','.join(['x', 'y']) }}{{ 1|default(999999) }}",
            [USER, ANSWER],
            "user, assistanta_bx,y1",
        ),
        (
            "{% for x in [[1, [2]], [3]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}"
            "{% for k, v in {'a': 1}.items() %}{{ k ~ v }}{% endfor %}"
            "{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}"
            "{% if loop.last %}{% break %}{% endif %}{{ i }}{% endfor %}",
            [USER],
            "123a1023",
        ),
    ],
)
def test_published_templates_write_what_they_always_did(
    source: str, messages: Sequence[dict[str, str]], text: str
) -> None:
    assert ChatTemplate(source).render(messages, "<s>", "</s>") == text


def test_long_conversations_and_messages_are_rendered() -> None:
    template = ChatTemplate(QWEN_3)
    assert len(template.render([{"role": "user", "content": "é" * 3_000_000}])) > 3_000_000
    assert template.render([USER, ANSWER] * 200 + [USER]).count("Why?") == 201
