"""Gemma's chat templates, reduced to calls and results."""

_GEMMA_VALUE = """\
{%- macro shown(value) %}
    {%- if value is string %}{{- '<escape>' + value + '<escape>' }}
    {%- elif value is boolean %}{{- 'true' if value else 'false' }}
    {%- elif value is mapping %}
        {{- '{' }}
        {%- for name, each in value | dictsort %}
            {{- name + ':' }}{{- shown(each) }}{{- '' if loop.last else ',' }}
        {%- endfor %}
        {{- '}' }}
    {%- elif value is sequence %}
        {{- '[' }}
        {%- for each in value %}{{- shown(each) }}{{- '' if loop.last else ',' }}{%- endfor %}
        {{- ']' }}
    {%- else %}{{- value }}{%- endif %}
{%- endmacro %}
{{- bos_token }}
"""

# FunctionGemma: the reply's turn stays open over its results, which begin where a call has ended.
FUNCTION_GEMMA = (
    _GEMMA_VALUE
    + """\
{%- set rest = messages[1:] if messages[0].role in ('system', 'developer') else messages %}
{%- if tools or messages[0].role in ('system', 'developer') %}
    {{- '<start_of_turn>developer\n' }}
    {%- if messages[0].role in ('system', 'developer') %}{{- messages[0].content | trim }}
    {%- endif %}
    {%- for tool in tools or [] %}
        {{- '<start_function_declaration>declaration:' + tool.function.name }}
        {{- '{parameters:' }}{{- shown(tool.function.parameters) }}
        {{- '}<end_function_declaration>' }}
    {%- endfor %}
    {{- '<end_of_turn>\n' }}
{%- endif %}
{%- set ns = namespace(before='') %}
{%- for message in rest %}
    {%- if message.role == 'tool' %}
        {{- '<start_function_response>response:' + message.name + '{value:' }}
        {{- shown(message.content) + '}<end_function_response>' }}
        {%- set ns.before = 'tool_response' %}
    {%- else %}
        {%- if ns.before != 'tool_response' or message.role != 'assistant' %}
            {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) }}
            {{- '\n' }}
        {%- endif %}
        {%- set ns.before = '' %}
        {{- (message.content or '') | trim }}
        {%- for call in message.tool_calls or [] %}
            {{- '<start_function_call>call:' + call.function.name }}
            {{- shown(call.function.arguments) + '<end_function_call>' }}
            {%- set ns.before = 'tool_call' %}
        {%- endfor %}
        {%- if ns.before == 'tool_call' and loop.last %}{{- '<start_function_response>' }}
        {%- elif ns.before != 'tool_call' %}{{- '<end_of_turn>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and ns.before != 'tool_response' %}
    {{- '<start_of_turn>model\n' }}
{%- endif %}"""
)

# Gemma 4: the same in other words; a call finds its results, and shows the reasoning before it.
GEMMA_4 = (
    _GEMMA_VALUE.replace("<escape>", '<|"|>')
    + """\
{%- set rest = messages[1:] if messages[0].role in ('system', 'developer') else messages %}
{%- if tools or messages[0].role in ('system', 'developer') %}
    {{- '<|turn>system\n' }}
    {%- if messages[0].role in ('system', 'developer') %}{{- messages[0].content | trim }}
    {%- endif %}
    {%- for tool in tools or [] %}
        {{- '<|tool>declaration:' + tool.function.name + '{parameters:' }}
        {{- shown(tool.function.parameters) + '}<tool|>' }}
    {%- endfor %}
    {{- '<turn|>\n' }}
{%- endif %}
{%- set ns = namespace(before='', last=-1, role='', going=true) %}
{%- for message in rest %}
    {%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in rest %}
    {%- if message.role != 'tool' %}
        {%- if message.role != 'assistant' or ns.role != 'assistant' %}
            {{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}
        {%- endif %}
        {%- set ns.role = message.role %}
        {%- set ns.before = '' %}
        {%- set reasoning = message.reasoning_content %}
        {%- if reasoning and loop.index0 > ns.last and message.tool_calls %}
            {{- '<|channel>thought\n' + reasoning + '\n<channel|>' }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '<|tool_call>call:' + call.function.name + shown(call.function.arguments) }}
            {{- '<tool_call|>' }}
            {%- set ns.before = 'tool_call' %}
        {%- endfor %}
        {%- set ns.going = true %}
        {%- for result in rest[loop.index0 + 1:] if message.tool_calls %}
            {%- if result.role != 'tool' %}{%- set ns.going = false %}{%- endif %}
            {%- if ns.going %}
                {%- set its = ('id', 'equalto', result.tool_call_id) %}
                {%- set call = message.tool_calls | selectattr(*its) | first %}
                {{- '<|tool_response>response:' + call.function.name + '{value:' }}
                {{- shown(result.content) + '}<tool_response|>' }}
                {%- set ns.before = 'tool_response' %}
            {%- endif %}
        {%- endfor %}
        {{- (message.content or '') | trim }}
        {%- if ns.before == 'tool_call' %}{{- '<|tool_response>' }}
        {%- elif ns.before != 'tool_response' %}{{- '<turn|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.before %}{{- '<|turn>model\n' }}{%- endif %}"""
)

# The prompt of the larger ones contains empty reasoning, which no history shows.
GEMMA_4_LARGE = GEMMA_4.replace(
    "{{- '<|turn>model\n' }}{%- endif %}",
    """{{- '<|turn>model\n' }}
    {%- if not enable_thinking | default(false) %}{{- '<|channel>thought\n<channel|>' }}{%- endif %}
{%- endif %}""",
)

# Gemma 3, with the prompt its makers give for calls; system and tools in the first user's message.
GEMMA_3 = """\
{{- bos_token }}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{%- set system = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}
{%- if tools %}
    {%- set system = system + 'To call a function, wrap the call in ```tool_code```. What it' %}
    {%- set system = system + ' returns is wrapped in ```tool_output```. These there are:\n' %}
    {%- set system = system + tools | tojson + '\n\n' %}
{%- endif %}
{%- for message in rest %}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\n' }}
    {%- if loop.first %}{{- system }}{%- endif %}
    {%- if message.role == 'tool' %}{{- '```tool_output\n' + message.content | trim + '\n```' }}
    {%- else %}{{- (message.content or '') | trim }}{%- endif %}
    {%- if message.tool_calls %}
        {{- '\n' if message.content }}{{- '```tool_code\n' }}
        {%- for call in message.tool_calls %}
            {{- call.function.name + '(' }}
            {%- for name, value in call.function.arguments.items() %}
                {{- name + '=' + (value | tojson) }}{{- '' if loop.last else ', ' }}
            {%- endfor %}
            {{- ')\n' }}
        {%- endfor %}
        {{- '```' }}
    {%- endif %}
    {{- '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}"""
