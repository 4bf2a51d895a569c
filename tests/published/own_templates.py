"""Small chat templates that together use every construct of the published ones."""

TEMPLATES = {
    "tests": (
        "{% for m in messages %}"
        "{% for v in (m, m.content, m.content is string, m.tool_calls, m.no_such, none, 1, 1.5, true) %}"
        "{{ v is defined }}{{ v is undefined }}{{ v is none }}{{ v is string }}{{ v is mapping }}"
        "{{ v is iterable }}{{ v is sequence }}{{ v is number }}{{ v is boolean }}{{ v is true }}"
        "{{ v is false }};{% endfor %}{% endfor %}{{ tools is none }}{{ documents is none }}"
        "{{ bos_token is defined }}{{ sep_token is defined }}{{ strftime_now is defined }}"
    ),
    "text filters": (
        "{% for m in messages %}{{ m.role | upper }}{{ m.role | capitalize }}{{ m.role | title }}"
        "{{ m.role | lower | safe }}{{ m.content | string | trim | replace('e', 'E') }}"
        "{{ (m.content | string).strip(' \n').lstrip('O').rstrip('.') }}{{ m.content | string | indent(4) }}"
        "{{ (m.content ~ '\nx\n') | indent(2, first=true) }}{{ m.name | default('?') }}"
        "{{ m.content | default('none', true) }}{{ '7' | int + 1 }}{% endfor %}"
    ),
    "methods": (
        "{% for m in messages %}{% set c = m.content if m.content is string else '' %}"
        "{{ c.split('</think>')[-1].split('\n')[0] }}{{ c.startswith(' ') }}{{ c.endswith('\n') }}"
        "{{ c.upper() }}{{ c.capitalize() }}{{ c.replace('s', 'z') }}{{ m.get('tool_calls', []) | length }}"
        "{{ m.get('name') }}{% for k, v in m.items() %}{{ k }}={{ v }},{% endfor %}{{ 'a{}b'.format(c) }}"
        "{{ '%s-%d' % (m.role, loop.index) }}{% endfor %}"
    ),
    "lists": (
        "{{ messages | map(attribute='role') | join(', ') }}{{ messages | map('length') | list }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
        "{{ messages | selectattr('tool_calls', 'defined') | list }}"
        "{{ messages | rejectattr('role', 'equalto', 'tool') | map(attribute='role') | list }}"
        "{{ messages | map(attribute='role') | reject('equalto', 'user') | list }}"
        "{{ messages | map(attribute='role') | unique | list }}"
        "{{ (messages | sort(attribute='role'))[0].role }}{{ [3, messages | length] | min }}"
        "{{ messages[::-1][0].role }}{{ messages[1:] | length }}"
    ),
    "objects": (
        "{% if tools %}{% for t in tools %}{% for k, v in t.function.parameters.properties | dictsort %}"
        "{{ k }}: {{ v.type }};{% endfor %}{% for k, v in t.function | items %}{{ k }}{% endfor %}"
        "{{ t | tojson }}{{ t | tojson(indent=4) }}{{ t | tojson(ensure_ascii=False) }}{% endfor %}"
        "{{ tools[0]['function']['name'] * 2 }}{% endif %}{{ {'a': [1, (2, 3)]} }}"
    ),
    "JSON": (
        "{{ messages | tojson(indent=2, sort_keys=true) }}{{ messages | tojson(separators=(',', ':')) }}"
        "{{ tools | tojson(ensure_ascii=true) }}{{ extra | default({}) | tojson(indent='..') }}"
    ),
    "loops": (
        "{% for m in messages if m.role != 'system' %}{{ loop.first }}{{ loop.last }}{{ loop.index0 }}"
        "{{ loop.index }}{{ loop.previtem.role if loop.previtem }}"
        "{{ loop.nextitem is defined and loop.nextitem.role }}{% if loop.index > 3 %}{% break %}"
        "{% elif m.role == 'tool' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}"
        "{% for i in range(3) %}{{ i - 1 }}{{ -i }}{{ i >= 1 and i <= 2 or i < 0 }}{{ i not in [0] }}"
        "{{ i in (1, 2) }}{% endfor %}"
    ),
    "state": (
        "{% set ns = namespace(last=-1, text='', found=false) %}{% for m in messages %}"
        "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
        "{% set ns.text = ns.text ~ m.role %}{% endfor %}{{ ns.last }}{{ ns.text }}{% set block %}["
        "{{ messages[0].role }}]{% endset %}{{ block }}{% filter upper %}{{ block }}{% endfilter %}"
    ),
    "names of a namespace": ("{% set ns = namespace() %}{% set ns._private = 1 %}{{ ns._private }}"),
    "macros": (
        "{% macro walk(v, depth=0) %}{% if v is mapping %}{% for k, x in v.items() %}{{ k }}"
        "{{ walk(x, depth + 1) }}{% endfor %}{% elif v is iterable and v is not string %}{% for x in v %}"
        "{{ walk(x, depth + 1) }}{% endfor %}{% else %}{{ depth }}{{ v }}{% endif %}{% endmacro %}"
        "{{ walk(messages) }}{{ walk(tools) if tools }}"
    ),
    "call blocks": (
        "{% macro framed(role) %}<{{ role }}>{{ caller(role) }}</{{ role }}>{% endmacro %}"
        "{% for m in messages %}{% call(role) framed(m.role) %}{{ role }}{{ m.content }}{% endcall %}"
        "{% endfor %}"
    ),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{%- generation -%} {% set said = m.content %}"
        "{{ said }}{{ eos_token }} {%- endgeneration -%}{% else %}{{ m.content }}{% endif %}"
        "{{ said is defined }}{% endfor %}"
    ),
    "date": ("{{ strftime_now('%d %B %Y') }}{{ strftime_now('%Y-%m-%d %H:%M') }}"),
    "refusal": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('No system messages.') }}{% endif %}"
        "{{ messages[0].content }}"
    ),
    "special tokens": (
        "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token }}{{ sep_token }}"
        "{{ cls_token + 'x' if cls_token is defined }}"
    ),
    "undefined": (
        "{{ no_such }}{% if no_such %}a{% endif %}{{ no_such ~ 'b' }}{% for x in no_such %}c{% endfor %}"
        "{{ no_such.deeper }}"
    ),
    "ends of lists, and formats": (
        "{{ (messages | first).role }}{{ messages | last | tojson }}{{ 'a %s' | format(messages | length) }}"
    ),
    "object methods that change them are refused": ("{% set x = {'a': 1} %}{{ x.update({'b': 2}) }}{{ x }}"),
    "JSON is not read": ("{{ messages[0].content | fromjson }}"),
    "list methods are refused": ("{% set x = [1] %}{{ x.append(2) }}{{ x }}"),
    "object methods are refused": ("{% set x = {'a': 1} %}{{ x.pop('a') }}{{ x }}"),
    "a filter that is not there": ("{{ messages[0].content | from_json }}"),
    "text and arguments": (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.function.name }}"
        "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}"
        "{% endfor %}{% endfor %}"
    ),
    "reasoning": (
        "{% for m in messages %}{% if m.reasoning_content is string %}<think>{{ m.reasoning_content }}"
        "</think>{% endif %}{{ m.thinking }}{{ m.reasoning }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<a>{% if enable_thinking is defined and enable_thinking is false %}"
        "<think></think>{% endif %}{{ reasoning_effort }}{% endif %}"
    ),
    "parts": (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{% if p['type'] == 'text' %}{{ p.text }}{% else %}<{{ p.type }}>"
        "{% endif %}{% endfor %}{% endif %}{% endfor %}"
    ),
    "documents": (
        "{% for d in documents or [] %}{{ loop.index }} {{ d['title'] }}: {{ d.text }}{{ d | tojson }}\n{% endfor %}"
    ),
    "blocks and blanks": (
        "{%- for m in messages -%}\n    {%- if m.role == 'user' %}\n        {{- m.content }}\n    {% endif %}"
        "\n\n{% endfor %}\n   {# a comment #}\n{{ '\\n' }}  {%- set x = 1 %}  end\n\n"
    ),
    "numbers": (
        "{{ 7 // 2 }}{{ 7 / 2 }}{{ 2 ** 3 }}{{ 7 % 3 }}{{ 1.0 }}{{ 1e3 }}{{ true }}{{ none }}"
        "{{ [1, none, true] }}{{ 'a' 'b' }}"
    ),
}
