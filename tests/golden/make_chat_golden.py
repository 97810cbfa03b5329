#!/usr/bin/env python3
"""Makes tests/golden/chat.json: chat templates in the shapes of the families', requests to them, and the prompts and ids that
transformers' apply_chat_template gives.  The tokenizers are those of tests/golden/tokenizer/.

Needs the packages transformers and jinja2."""

import json
import os
import pathlib
import shutil
import sys
import tempfile

sys.dont_write_bytecode = True
HERE = pathlib.Path(__file__).resolve().parent

LLAMA2 = """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}
{%- else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}
{%- for message in loop_messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}
{%- if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}
{%- else %}{% set content = message['content'] %}{% endif %}
{%- if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}
{%- endfor %}"""

LLAMA3 = """{{- bos_token }}
{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}
{%- if not date_string is defined %}{% set date_string = strftime_now("%d %b %Y") %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {{- "Given the following functions, please respond with a JSON for a function call.\\n\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}{{- "<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}{%- else %}{{- message.content }}{%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}{%- else %}{{- 'You are a helpful assistant.' }}{%- endif %}
    {{- "\\n\\n# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" %}{%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.reasoning_content is defined and loop.index0 > ns.last_query_index %}{{- '\\n<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>' }}{%- endif %}
        {%- if message.content %}{{- '\\n' }}{% generation %}{{- message.content }}{% endgeneration %}{%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}{{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

CHATML = """{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}{{- tool.function | tojson }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}{%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}{{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- elif message["role"] == "assistant" and message.tool_calls is defined %}
        {{- "[TOOL_CALLS] " }}{%- for call in message.tool_calls %}{{- dict(name=call.function.name, arguments=call.function.arguments) | tojson }}{%- endfor %}{{- eos_token }}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + "}[/TOOL_RESULTS]" }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, with the exception of an initial optional system message!") }}
    {%- endif %}
{%- endfor %}
"""

PHI = """{% for message in messages %}{% if message['role'] == 'system' %}{% continue %}{% endif %}
{%- if loop.index > 6 %}{% break %}{% endif -%}
<|{{ message.role }}|>
{{ message.content | upper | replace('A', 'a') }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% else %}{{ eos_token }}{% endif %}"""

# Name: (tokenizer, template or named templates, whether it is a file of its own).
TEMPLATES = {
    "llama2": ("llama2", LLAMA2, False),
    "llama3": ("llama", LLAMA3, True),
    "qwen": ("qwen", [{"name": "default", "template": QWEN}, {"name": "tool_use", "template": "TOOLS\\n" + QWEN}], False),
    "chatml": ("qwen", CHATML, False),
    "mistral": ("mistral", MISTRAL, True),
    "phi": ("mistral", PHI, False),
}

TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Says <how> it is & will be in é.",
          "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]
CALL = {"role": "assistant", "content": None, "tool_calls": [
    {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Zürich", "days": [1, 2.5, null, true]}'}}]}
USER = {"role": "user", "content": "What is 2 + 2?\n"}
SYSTEM = {"role": "system", "content": "Be short. <|im_start|> is text."}
ANSWER = {"role": "assistant", "content": "  It is 4. 👍🏽 "}
BODIES = [
    {"messages": [USER]},
    {"messages": [SYSTEM, USER]},
    {"messages": [SYSTEM, USER, ANSWER, {"role": "user", "content": "<b>\"é\"</b>  e\u0301 </s>"}]},
    {"messages": [USER, ANSWER], "add_generation_prompt": False},
    {"messages": [USER, ANSWER], "add_generation_prompt": False, "continue_final_message": True},
    {"messages": [USER, {"role": "assistant", "content": "It is"}], "add_generation_prompt": False, "continue_final_message": True},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]},
    {"messages": [USER], "tools": TOOLS},
    {"messages": [USER, CALL, {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}], "tools": TOOLS},
    {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False, "date_string": "26 Jul 2024"}},
    {"messages": [USER, {"role": "assistant", "content": "4", "reasoning": "two and two\n"}], "add_generation_prompt": False},
    {"messages": [{"role": "robot", "content": "beep"}]},
    {"messages": [ANSWER, USER]},
]
DATE = 1721952000  # 26 July 2024, for strftime_now


def make_model(folder, name):
    """A model directory's tokenizer with its template; the template itself if it stands in the configuration."""
    tokenizer, template, own_file = TEMPLATES[name]
    shutil.copytree(HERE / "tokenizer" / tokenizer, folder, dirs_exist_ok=True)
    config = folder / "tokenizer_config.json"
    if own_file:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        template = "never used"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))
    return folder


def as_transformers_takes_it(body):
    """(messages, arguments): parts joined, arguments as objects."""
    messages = json.loads(json.dumps(body["messages"]))
    for message in messages:
        if isinstance(message.get("content"), list):
            message["content"] = "\n".join(part["text"] for part in message["content"])
        for call in message.get("tool_calls") or []:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    arguments = {"tools": body.get("tools"), "add_generation_prompt": body.get("add_generation_prompt", True)}
    arguments["continue_final_message"] = body.get("continue_final_message", False)
    return messages, arguments | body.get("chat_template_kwargs", {})


def main():
    import time
    import jinja2
    import transformers
    from transformers.utils import chat_template_utils

    class Fixed(chat_template_utils.datetime):
        @classmethod
        def now(cls):
            return cls(*time.gmtime(DATE)[:6])

    chat_template_utils.datetime = Fixed
    cases = {}
    for name in TEMPLATES:
        with tempfile.TemporaryDirectory() as folder:
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(make_model(pathlib.Path(folder), name)))
        cases[name] = []
        for body in BODIES:
            messages, arguments = as_transformers_takes_it(body)
            try:
                text = tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
                ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **arguments)
                assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
                cases[name].append({"prompt": text, "ids": ids})
            except (jinja2.exceptions.TemplateError, ValueError) as problem:
                cases[name].append({"error": str(problem).splitlines()[0]})
    golden = {"transformers": transformers.__version__, "jinja2": jinja2.__version__, "cases": cases}
    (HERE / "chat.json").write_text(json.dumps(golden, separators=(",", ":")) + "\n")
    for name, all_cases in cases.items():
        print(name, sum("ids" in case for case in all_cases), "prompts", [c["error"][:60] for c in all_cases if "error" in c])


if __name__ == "__main__":
    main()
