"""Chat templates that support tools or reasoning, in the styles of real models."""

# Tools in the system message, calls as JSON between tags, results in a user's turn.
HERMES = """\
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- '# Tools\n<tools>' }}
    {%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}{{- '\n' }}{%- endif %}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

# The same, with reasoning: shown after the last message that a user wrote, and not before it.
THINKING = HERMES.replace(
    "{%- for message in messages %}",
    """{%- set ns = namespace(last=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}""",
    1,
).replace(
    "{{- '<|im_start|>assistant\n' + (message.content or '') }}",
    """{{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last and message.reasoning_content %}
            {{- '<think>\n' + message.reasoning_content.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- message.content or '' }}""",
)

# gpt-oss: channels, reasoning in a field called `thinking`, a token of its own that ends a call.
CHANNELS = """\
{{- '<|start|>system<|message|>You are ChatGPT.<|end|>' }}
{%- if tools %}
    {{- '<|start|>developer<|message|># Tools\n\nnamespace functions {\n' }}
    {%- for tool in tools %}
        {{- 'type ' + tool.function.name + ' = (_: ' + tool.function.parameters | tojson + ');\n' }}
    {%- endfor %}
    {{- '}<|end|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- if message.content and message.thinking %}
            {{- raise_exception('Cannot pass both content and thinking with tool calls') }}
        {%- elif message.content or message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' }}
            {{- message.content or message.thinking }}
            {{- '<|end|>' }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant to=functions.' + call.name }}
        {{- '<|channel|>commentary json<|message|>' + call.arguments | tojson + '<|call|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

# DeepSeek: arguments are put together with other text, so they have to be one.
STRINGS = """\
{{- bos_token }}
{%- for tool in tools or [] %}{{- tool.function.name + '\n' }}{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- 'User: ' + message.content }}
    {%- elif message.role == 'tool' %}{{- 'Result: ' + message.content }}
    {%- else %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- 'Call: ' + call.function.name + '\n```json\n' + call.function.arguments + '\n```' }}
        {%- endfor %}
        {{- '</s>' }}
    {%- endif %}
{%- endfor %}"""

# Gemma: users and models take turns, and nobody else speaks.
TURNS = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}\
{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}\
{% endif %}{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}\
{{ '<|im_start|>' + role + '\n' + message['content'] | trim + '<|im_end|>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}"""

# gpt-oss again: every function has to have a description, and of the calls the first is shown.
DESCRIBED = CHANNELS.replace(
    "{{- 'type ' + tool.function.name",
    "{{- '// ' + tool.function.description + '\n' }}{{- 'type ' + tool.function.name",
).replace("tool.function.parameters | tojson", "(tool.function.parameters or {}) | tojson")

# Mistral: ids of nine letters, and users and replies take turns, calls and results aside.
NINE = """\
{{- bos_token }}
{%- set ns = namespace(index=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {%- if (message.role == 'user') != (ns.index % 2 == 0) %}
            {{- raise_exception('conversation roles must alternate user and assistant') }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and loop.last %}{{- '[AVAILABLE_TOOLS]' + tools | tojson }}{%- endif %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in message.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should be strings with length 9!') }}
            {%- endif %}
            {{- '{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + ', "id": "' + call.id + '"}' }}
            {{- ', ' if not loop.last }}
        {%- endfor %}
        {{- ']</s>' }}
    {%- elif message.role == 'tool' %}
        {%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 %}
            {{- raise_exception('Tool call IDs should be strings with length 9!') }}
        {%- endif %}
        {{- '[TOOL_RESULTS]{"content": ' + message.content + ', "call_id": "' }}
        {{- message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}{{- message.content + '</s>' }}
    {%- endif %}
{%- endfor %}"""

# Llama 3.1: one call in a message, and its name and parameters.
ONE_CALL = """\
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
    {%- else %}
        {%- if tools and loop.first %}{{- tools | tojson + '\\n' }}{%- endif %}
        {{- message.content }}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}"""
