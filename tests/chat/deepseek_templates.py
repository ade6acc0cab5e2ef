"""DeepSeek's chat templates, reduced to calls and results."""


def _wide(template: str) -> str:
    """Encloses DeepSeek's markers in full-width lines."""
    return template.replace("<|", "<\uff5c").replace("|>", "\uff5c>")


_DEEPSEEK_TOLD = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{{- message.content }}{%- endif %}
{%- endfor %}
{%- if tools %}
    {{- '\n\n## Tools\nYou have access to the following tools:\n' }}
    {%- for tool in tools %}{{- '\n' + tool.function | tojson + '\n' }}{%- endfor %}
{%- endif %}
"""

# DeepSeek V3: a type before the name, JSON in a fence; the reply goes on after a block of results.
DEEPSEEK_V3 = _wide(
    _DEEPSEEK_TOLD
    + """\
{%- set ns = namespace(is_first=false, is_tool=false, is_output_first=true) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set ns.is_tool = false %}
        {{- '<|User|>' + message.content + '<|Assistant|>' }}
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {%- if ns.is_tool %}{{- '<|tool▁outputs▁end|>' }}{%- endif %}
        {%- set ns.is_first = true %}
        {%- set ns.is_tool = false %}
        {%- set ns.is_output_first = true %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls %}
            {{- '<|tool▁calls▁begin|>' if ns.is_first else '\n' }}
            {{- '<|tool▁call▁begin|>' + call.type + '<|tool▁sep|>' + call.function.name }}
            {{- '\n```json\n' + call.function.arguments + '\n```<|tool▁call▁end|>' }}
            {%- set ns.is_first = false %}
        {%- endfor %}
        {{- '<|tool▁calls▁end|><|end▁of▁sentence|>' }}
    {%- elif message.role == 'assistant' %}
        {%- if ns.is_tool %}{{- '<|tool▁outputs▁end|>' }}{%- endif %}
        {%- set ns.is_tool = false %}
        {{- message.content + '<|end▁of▁sentence|>' }}
    {%- elif message.role == 'tool' %}
        {%- set ns.is_tool = true %}
        {{- '<|tool▁outputs▁begin|>' if ns.is_output_first else '\n' }}
        {{- '<|tool▁output▁begin|>' + message.content + '<|tool▁output▁end|>' }}
        {%- set ns.is_output_first = false %}
    {%- endif %}
{%- endfor %}
{%- if ns.is_tool %}{{- '<|tool▁outputs▁end|>' }}{%- endif %}"""
)

# DeepSeek R1: the end of results stands before an answer and at the end, and before no call.
DEEPSEEK_R1 = DEEPSEEK_V3.replace(
    f"""{{%- elif message.role == 'assistant' and message.tool_calls %}}
        {{%- if ns.is_tool %}}{{{{- '{_wide("<|tool▁outputs▁end|>")}' }}}}{{%- endif %}}""",
    "{%- elif message.role == 'assistant' and message.tool_calls %}",
)

# DeepSeek V3.1: neither type nor fence; closed reasoning stands before every first reply.
DEEPSEEK_V31 = _wide(
    _DEEPSEEK_TOLD
    + """\
{%- set ns = namespace(is_last_user=false) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set ns.is_last_user = true %}
        {{- '<|User|>' + message.content }}
    {%- elif message.role == 'assistant' %}
        {%- if ns.is_last_user %}{{- '<|Assistant|></think>' }}{%- endif %}
        {%- set ns.is_last_user = false %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {%- if loop.first %}{{- '<|tool▁calls▁begin|>' }}{%- endif %}
            {{- '<|tool▁call▁begin|>' + call.function.name + '<|tool▁sep|>' }}
            {{- call.function.arguments + '<|tool▁call▁end|>' }}
            {%- if loop.last %}{{- '<|tool▁calls▁end|>' }}{%- endif %}
        {%- endfor %}
        {{- '<|end▁of▁sentence|>' }}
    {%- elif message.role == 'tool' %}
        {%- set ns.is_last_user = false %}
        {{- '<|tool▁output▁begin|>' + message.content + '<|tool▁output▁end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and ns.is_last_user %}
    {{- '<|Assistant|>' + ('<think>' if thinking else '</think>') }}
{%- endif %}"""
)
