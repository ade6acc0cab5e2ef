"""Chat templates in the styles of real models."""

CHATML = """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face\
<|im_end|>\n' }}{% endif %}\
{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# A BOS of its own, trimmed content, an optional date and tools as JSON.
HEADERS = """\
{{- bos_token }}
{%- if tools is not none %}
    {{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
    {{- '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

# Refuses roles out of order; the end token after each reply.
ALTERNATING = """\
{{ bos_token }}{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}\
{% endif %}\
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}\
{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"""

# Content as a string or as parts; thinking as an option; replies marked for training.
PARTS = """\
{%- set ns = namespace(last=none) %}
{%- for message in messages %}
    {%- if message.role == 'comment' %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
        {{- message.content if message.content is not none else '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' + call.function | tojson + '</tool_call>' }}
        {%- endfor %}
        {%- endgeneration %}
    {%- elif message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {{- part.text if part.type == 'text' else '<|' + part.type + '|>' }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\n' }}
    {%- set ns.last = message.role %}
{%- endfor %}
{%- if add_generation_prompt and ns.last != 'assistant' %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""
