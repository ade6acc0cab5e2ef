"""Chat templates of model families, reduced to what shows calls and results."""

_QWEN_TOLD = """\
{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- endif %}
{%- if tools %}
    {{- '\n\n# Tools\n\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n<function>\n<name>' + tool.function.name + '</name>\n</function>' }}
    {%- endfor %}
    {{- '\n</tools>\n\n<tool_call>\n<function=example_function_name>\n' }}
    {{- '<parameter=example_parameter_1>\nvalue_1\n</parameter>\n</function>\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- macro tagged(call) %}
    {{- '<tool_call>\n<function=' + call.name + '>\n' }}
    {%- for name, value in call.arguments | items %}
        {{- '<parameter=' + name + '>\n' }}
        {{- value if value is string else value | tojson }}
        {{- '\n</parameter>\n' }}
    {%- endfor %}
    {{- '</function>\n</tool_call>' }}
{%- endmacro %}
"""
_QWEN_OTHERS = """\
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem and loop.previtem.role != 'tool' %}{{- '<|im_start|>user\n' }}
        {%- endif %}
        {{- '<tool_response>\n' + message.content + '\n</tool_response>\n' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
"""

# Qwen3-Coder: a tag for each parameter, results in a user's turn.
QWEN3_CODER = (
    _QWEN_TOLD
    + """\
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content is string and message.content | trim %}
            {{- '\n' + message.content | trim + '\n' }}
        {%- endif %}
        {%- for call in message.tool_calls %}{{- '\n' }}{{- tagged(call.function) }}{%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' + message.content + '<|im_end|>\n' }}
"""
    + _QWEN_OTHERS
    + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)

# Qwen 3.5: the same after reasoning, which the prompt opens and a later user's message takes away.
QWEN35 = (
    _QWEN_TOLD
    + """\
{%- set ns = namespace(last=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last %}
            {{- '<think>\n' + (message.reasoning_content or '') | trim + '\n</think>\n\n' }}
        {%- endif %}
        {%- set content = (message.content or '') | trim %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n' if not loop.first else '\n\n' if content else '' }}
            {{- tagged(call.function) }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
"""
    + _QWEN_OTHERS
    + """\
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n<think>\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '\n</think>\n\n' }}{%- endif %}
{%- endif %}"""
)

# Llama 3.1 to 3.3: tools in the first user's message, one call at a time, results as JSON.
LLAMA3 = """\
{{- bos_token }}
{%- set system = messages[0].content | trim if messages[0].role == 'system' else '' %}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools %}{{- 'Environment: ipython\n' }}{%- endif %}
{{- system + '<|eot_id|>' }}
{%- if tools %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\n' }}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name' }}
    {{- ' and its value}. Do not use variables.\n\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) + '\n\n' }}{%- endfor %}
    {{- rest[0].content | trim + '<|eot_id|>' }}
    {%- set rest = rest[1:] %}
{%- endif %}
{%- for message in rest %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
        {{- '<|eot_id|>' }}
    {%- elif message.role in ('tool', 'ipython') %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
        {{- message.content | tojson + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}"""

# LFM2.5: Python between markers; None is no content.
LFM25 = """\
{{- bos_token }}
{%- macro text(value) %}
    {%- if value is string %}{{- "'" + value + "'" }}
    {%- elif value is mapping %}{{- value | tojson }}
    {%- else %}{{- value | string }}{%- endif %}
{%- endmacro %}
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{%- if tools %}{%- set system = system + '\n\nList of tools: ' + tools | tojson %}{%- endif %}
{%- if system %}{{- '<|im_start|>system\n' + system + '<|im_end|>\n' }}{%- endif %}
{%- for message in rest %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.content is string %}{{- message.content }}
    {%- else %}{%- for part in message.content %}{{- part.text }}{%- endfor %}{%- endif %}
    {%- if message.tool_calls is defined %}
        {%- set ns = namespace(calls=[]) %}
        {%- for call in message.tool_calls %}
            {%- set each = namespace(pairs=[]) %}
            {%- for name, value in call.function.arguments.items() %}
                {%- set each.pairs = each.pairs + [name + '=' + text(value)] %}
            {%- endfor %}
            {%- set pairs = each.pairs | join(', ') %}
            {%- set ns.calls = ns.calls + [call.function.name + '(' + pairs + ')'] %}
        {%- endfor %}
        {{- '<|tool_call_start|>[' + ns.calls | join(', ') + ']<|tool_call_end|>' }}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

# The first LFM2 shows tools but no calls: those of a history are written into the reply's text.
LFM2 = """\
{{- bos_token }}
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{%- if tools %}
    {%- set system = system + '\nList of tools: <|tool_list_start|>' + tools | tojson %}
    {%- set system = system + '<|tool_list_end|>' %}
{%- endif %}
{%- if system %}{{- '<|im_start|>system\n' + system + '<|im_end|>\n' }}{%- endif %}
{%- for message in rest %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- set content = message.content %}
    {%- if content is not string %}{%- set content = content | tojson %}{%- endif %}
    {%- if message.role == 'tool' %}
        {%- set content = '<|tool_response_start|>' + content + '<|tool_response_end|>' %}
    {%- endif %}
    {{- content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
{#- The model writes <|tool_call_start|>[…]<|tool_call_end|>. #}"""

# Mistral Small 3.1: a list of calls with their ids; tools stand before the last user's message.
MISTRAL_LIST = """\
{{- bos_token }}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{%- if messages[0].role == 'system' %}
    {{- '[SYSTEM_PROMPT]' + messages[0].content + '[/SYSTEM_PROMPT]' }}
{%- endif %}
{%- set users = rest | selectattr('role', 'equalto', 'user') | list %}
{%- for message in rest %}
    {%- if message.role == 'user' %}
        {%- if tools is not none and message == users[-1] %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length < 9 %}
                {{- raise_exception('Tool call IDs should be of length >= 9!') }}
            {%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id[-9:] + '"}' }}
            {{- ']' + eos_token if loop.last else ', ' }}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}
        {{- message.content + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string }}
        {{- ', "call_id": "' + message.tool_call_id[-9:] + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""

# Mistral Small 3.2: a marker for each part of a call, its id among them.
MISTRAL_ID = (
    MISTRAL_LIST.replace("        {{- '[TOOL_CALLS] [' }}\n", "")
    .replace(
        """            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id[-9:] + '"}' }}
            {{- ']' + eos_token if loop.last else ', ' }}
        {%- endfor %}""",
        """            {{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id }}
            {{- '[ARGS]' + call.function.arguments | tojson }}
        {%- endfor %}
        {{- eos_token }}""",
    )
    .replace(
        """'[TOOL_RESULTS] {"content": ' + message.content | string }}
        {{- ', "call_id": "' + message.tool_call_id[-9:] + '"}[/TOOL_RESULTS]' }}""",
        """'[TOOL_RESULTS]' + message.tool_call_id + '[TOOL_CONTENT]' + message.content }}
        {{- '[/TOOL_RESULTS]' }}""",
    )
)

# Ministral 3 and Devstral 2: no ids, and tools stand where they stay.
MISTRAL_ARGS = """\
{{- bos_token }}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{%- if messages[0].role == 'system' %}
    {{- '[SYSTEM_PROMPT]' + messages[0].content + '[/SYSTEM_PROMPT]' }}
{%- endif %}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in rest %}
    {%- if message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {%- set arguments = call.function.arguments %}
            {%- if arguments is not string %}{%- set arguments = arguments | tojson %}{%- endif %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + arguments }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]' + message.content | string + '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""
