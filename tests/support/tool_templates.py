"""Small chat templates that write tool calls as those of real models do."""

from __future__ import annotations

from castiron.pipelines.text.derive_tool_format import tool_format_of

_TURNS = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
_END = "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"


def _template(call: str, begin: str = "", between: str = "", end: str = "") -> str:
    """Return a template that writes calls as `call`, where name and args are those of a call."""
    calls = (
        f"{{% for c in m.tool_calls or [] %}}{{% set name = c.function.name %}}{{% set args = c.function.arguments %}}"
        f"{{% if loop.first %}}{begin}{{% else %}}{between}{{% endif %}}{call}{{% if loop.last %}}{end}{{% endif %}}{{% endfor %}}"
    )
    return _TURNS + calls + _END


def _each(argument: str, between: str = "") -> str:
    return f"{{% for k, v in args.items() %}}{{% if not loop.first %}}{between}{{% endif %}}{argument}{{% endfor %}}"


_TEXT = "{{ v if v is string else v | tojson }}"
_GEMMA = "{{{{ name }}}}{{{{ '{{' }}}}{each}{{{{ '}}' }}}}"
_QUOTED = "{{{{ k }}}}:{{% if v is string %}}{quote}{{{{ v }}}}{quote}{{% else %}}{{{{ v | tojson }}}}{{% endif %}}"
_LINE = "{{ '\\n' }}"
# Lists and objects as tags, as in MiniMax-M3.
_NESTED = (
    "{% macro nested(v) %}{% if v is mapping %}{% for k, each in v.items() if each is not none %}]<]<{{ k }}>{{ nested(each) }}]<]</{{ k }}>"
    "{% endfor %}{% elif v is string %}{{ v }}{% elif v is iterable %}{% for each in v %}]<]<item>{{ nested(each) }}]<]</item>{% endfor %}"
    "{% elif v is boolean %}{{ v | tojson }}{% elif v is not none %}{{ v }}{% endif %}{% endmacro %}"
)
_JSON = '{"name": "{{ name }}", "arguments": {{ args | tojson }}}'
TEMPLATES = {
    "hermes": _template(f"<tool_call>\n{_JSON}\n</tool_call>", _LINE, _LINE),
    "qwen-xml": _template(
        "<tool_call>\n<function={{ name }}>\n" + _each(f"<parameter={{{{ k }}}}>\n{_TEXT}\n</parameter>\n") + "</function>\n</tool_call>",
        _LINE, _LINE,
    ),
    "glm": _template(
        "<tool_call>{{ name }}\n" + _each(f"<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{_TEXT}</arg_value>\n") + "</tool_call>",
        _LINE, _LINE,
    ),
    "dsml": _template(
        '<|D|invoke name="{{ name }}">\n' + _each(
            f'<|D|parameter name="{{{{ k }}}}" string="{{{{ (v is string) | tojson }}}}">{_TEXT}</|D|parameter>\n'
        ) + "</|D|invoke>\n", "\n\n<|D|calls>\n", "", "</|D|calls>",
    ),
    "keys": _template('<call name="{{ name }}">' + _each(f"<{{{{ k }}}}>{_TEXT}</{{{{ k }}}}>") + "</call>"),
    # Lists and objects as Python writes them, as in Seed-OSS and MiniCPM5.
    "minicpm": _template(
        '<function name="{{ name }}">' + _each('<param name="{{ k }}">{{ v }}</param>') + "</function>", between=_LINE
    ),
    "nested": _NESTED + _template("]<]<invoke name=\"{{ name }}\">{{ nested(args) }}]<]</invoke>", "]<]<calls>", _LINE, "]<]</calls>"),
    "kimi": _template(
        "<|call_begin|>functions.{{ name }}:{{ loop.index0 }}<|args|>{{ args | tojson }}<|call_end|>", "<|calls_begin|>", "",
        "<|calls_end|>",
    ),
    "llama3": _template('{"name": "{{ name }}", "parameters": {{ args | tojson }}}', between="; "),
    "mistral": _template(_JSON, "[TOOL_CALLS][", ", ", "]"),
    "mistral-args": _template("[TOOL_CALLS]{{ name }}[ARGS]{{ args | tojson }}"),
    "gemma4": _template(
        "<|tool_call>call:" + _GEMMA.format(each=_each(_QUOTED.format(quote='<|"|>'), ",")) + "<tool_call|>"
    ),
    "functiongemma": _template(
        "<start_function_call>call:" + _GEMMA.format(each=_each(_QUOTED.format(quote="<escape>"), ",")) + "<end_function_call>"
    ),
    "lfm2": _TURNS + "{# <|tool_call_start|> #}" + _END,
    "harmony": "<|start|>assistant<|channel|>analysis<|message|>",
}  # fmt: skip
FORMATS = {name: tool_format_of(template) for name, template in TEMPLATES.items()}
