"""Renders the chat lines of an input file with the model's template, in a process of its own: a template is a program of strangers.

    chat_worker.py MODEL INPUT OUTPUT OFFSET LINE RENDERS

Reads INPUT from OFFSET on, where line LINE begins, and appends to OUTPUT a JSON line for each chat line: {"line", "prompt"} or
{"line", "error", "param", "code"}. Before it renders a line it writes the line's number and the offset behind it to stdout.
RENDERS is `no` after too many lines whose rendering had to be ended: the others then get their error without a try.

The kernel ends the process where a line or the template's compilation takes more than SECONDS of computing, and refuses it
memory beyond a bound. It ends by itself with 2 and a sentence on stderr if the template does not compile or jinja2 is missing.

Rendering is that of transformers 5 (utils/chat_template_utils.py): same sandbox, filters, globals and arguments.
"""

import json
import os
import re
import resource
import signal
import stat
import sys
import time

CHAT_LINE = re.compile(rb"chat\\?/completions")
# What strangers' lines and templates may cost (launch/README.md, Chat lines). A new bound goes here, also one that chat_prompts.py keeps.
SECONDS = 1.5  # of computing, for a line or to compile a template: with the start of the next worker, a line ends within two
MEMORY = 1 << 30  # of this process's address space, Python included, for all its lines
MOST_ENDED = 8  # lines whose rendering had to be ended; after them no other is tried
LONGEST_LINE = 64 << 20  # kLongestLine of planner/requests/request_lines.h
LONGEST_PROMPT = 16 << 20
LONGEST_TEMPLATE = 16 << 20
_LONGEST_REASON = 300
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Of tokenizer classes that have names for tokens where no file has them.
_CLASS_TOKENS = {
    "Llama": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "GPT2": dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
    "Qwen2": dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>"),
}
# What apply_chat_template takes itself, so that no template sees it.
_NOT_FOR_TEMPLATES = {
    *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message"),
    *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    *("tokenizer_kwargs", "sanitize_control_tokens"),
}
_REASONING = ("reasoning_content", "thinking", "reasoning")
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class BadLine(Exception):
    def __init__(self, message, param="messages", code="invalid_value"):
        super().__init__(message)
        self.entry = {"error": message, "param": param, "code": code}


class BadModel(Exception):
    """The template cannot be used for any line."""


# ---- the model's files


def read_regular(path, most):
    """The text of a file, or None if it is not there."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise BadModel(f"{path}: {problem.strerror}") from None
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise BadModel(f"{path}: a regular file is needed")
        text = file.read(most + 1)
    if len(text) > most:
        raise BadModel(f"{path}: more than {most >> 20} MiB")
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadModel(f"{path} is not UTF-8") from None


def read_object(path):
    """The JSON object in a file; {} if it is not there."""
    text = read_regular(path, LONGEST_TEMPLATE)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise BadModel(f"{path} is no JSON object; fetch the model again")
    return value


def read_templates(model, config):
    """Template texts by name; `default` is the one that is used without tools."""
    single = read_regular(os.path.join(model, "chat_template.jinja"), LONGEST_TEMPLATE)
    if single is not None:
        templates = {"default": single}
        folder = os.path.join(model, "additional_chat_templates")
        for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
            if name.endswith(".jinja"):
                templates[name.removesuffix(".jinja")] = read_regular(os.path.join(folder, name), LONGEST_TEMPLATE)
        return templates
    listed = config.get("chat_template")
    if listed is None:
        return {}
    if isinstance(listed, str):
        return {"default": listed}
    if isinstance(listed, list) and all(isinstance(one, dict) for one in listed):
        listed = {one.get("name"): one.get("template") for one in listed}
    if not isinstance(listed, dict) or not all(isinstance(text, str) for pair in listed.items() for text in pair):
        raise BadModel(f'{os.path.join(model, "tokenizer_config.json")}: "chat_template" must be text or a list of named texts')
    return listed


def special_tokens(model, config):
    """What templates see as bos_token, eos_token …"""
    named = {}
    for name, tokens in _CLASS_TOKENS.items():
        if str(config.get("tokenizer_class") or "").removesuffix("Fast") == f"{name}Tokenizer":
            named |= tokens
    more = {} if "added_tokens_decoder" in config else read_object(os.path.join(model, "special_tokens_map.json"))
    for role in ROLES:
        for source in (config, more):
            if role in source:
                value = source[role]
                named[role] = value.get("content") if isinstance(value, dict) else value
    return {role: value for role, value in named.items() if isinstance(value, str)}


# ---- the template


def compiled(text):
    try:
        import jinja2
        import jinja2.ext
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise BadModel(
            "chat lines need Python's package jinja2: apt-get install python3-jinja2 (Debian), or leave out the lines for "
            "/v1/chat/completions"
        ) from None

    class Generation(jinja2.ext.Extension):
        """{% generation %} marks what an assistant wrote; its text stands as it is."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_itself"), [], [], body).set_lineno(line)

        def _itself(self, caller):
            return caller()

    class TemplateDict:
        def __call__(self, *args, **kwargs):
            return dict(*args, **kwargs)

        def fromkeys(self, *args, **kwargs):
            return dict.fromkeys(*args, **kwargs)

    class TemplateNamespace(jinja2.utils.Namespace):
        def __init__(*args, **kwargs):
            self, args = args[0], args[1:]
            values = dict(*args, **kwargs)
            for name in values:
                TemplateNamespace._check(name)
            jinja2.utils.Namespace.__init__(self, values)

        def __setitem__(self, name, value):
            TemplateNamespace._check(name)
            jinja2.utils.Namespace.__setitem__(self, name, value)

        @staticmethod
        def _check(name):
            if isinstance(name, str) and name.startswith("_"):
                raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(form):
        date = os.environ.get("SOURCE_DATE_EPOCH", "")
        return time.strftime(form, time.gmtime(int(date)) if date.isdigit() else time.localtime())

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    environment.globals |= {"dict": TemplateDict(), "namespace": TemplateNamespace}
    try:
        return environment.from_string(text)
    except jinja2.exceptions.TemplateSyntaxError as problem:
        raise BadModel(f"the model's chat template does not compile: line {problem.lineno}: {in_a_line(problem.message)}") from None
    except (ValueError, RecursionError, MemoryError, SyntaxError, OverflowError, TypeError) as problem:
        raise BadModel(f"the model's chat template does not compile: {type(problem).__name__}") from None


def in_a_line(text):
    """Part of a message: printable, short, and the same in each run."""
    text = re.sub(r"0x[0-9a-fA-F]{6,}", "0x…", str(text))[:_LONGEST_REASON]
    return "".join(c if c.isprintable() else " " for c in text)


# ---- one line


def content_of(message, number):
    """The message as templates see it: text for content, objects for arguments, no field that is null."""
    where = f'"messages": message {number}'
    if not isinstance(message, dict):
        raise BadLine(f"{where} must be an object")
    message = {name: value for name, value in message.items() if value is not None}
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise BadLine(f'{where}: "role" must be text that is not empty')
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text" or not isinstance(part.get("text"), str):
                named = f' {in_a_line(json.dumps(kind, ensure_ascii=False))}' if isinstance(kind, str) and kind != "text" else ""
                raise BadLine(f"{where}: a part of its content{named} is not supported; parts of type \"text\" are")
        message["content"] = "\n".join(part["text"] for part in content)
    elif content is not None and not isinstance(content, str):
        raise BadLine(f'{where}: "content" must be text or a list of parts')
    elif content is None and not message.get("tool_calls"):
        raise BadLine(f'{where}: "content" is missing', code="missing_required_parameter")
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise BadLine(f'{where}: "tool_calls" must be a list')
        message["tool_calls"] = [call_of(call, where) for call in calls]
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def call_of(call, where):
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise BadLine(f'{where}: each of "tool_calls" must be an object with "function"')
    arguments = function.get("arguments")
    if isinstance(arguments, str) or arguments is None:
        try:
            arguments = json.loads(arguments) if arguments else {}
        except (ValueError, RecursionError):
            raise BadLine(f"{where}: the arguments of a tool call are no JSON") from None
    return {**call, "function": {**function, "arguments": arguments}}


def flag(body, name, default):
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise BadLine(f'"{name}" must be true or false', name)
    return default if value is None else value


class Renderer:
    def __init__(self, model):
        config = read_object(os.path.join(model, "tokenizer_config.json"))
        texts = read_templates(model, config)
        self._tokens = special_tokens(model, config)
        self._texts = texts
        self._templates = {}
        for name in ("default", "tool_use"):
            if name in texts:
                with bounded_time():
                    self._templates[name] = compiled(texts[name])

    def prompt(self, body):
        if not self._texts:
            raise BadLine("this model has no chat template, so only /v1/completions is answered", "url", "no_chat_template")
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise BadLine('"messages" must be a list that is not empty')
        messages = [content_of(message, number) for number, message in enumerate(messages, 1)]
        tools = body.get("tools")
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            raise BadLine('"tools" must be a list of objects', "tools")
        given = body.get("chat_template_kwargs")
        if given is not None and not isinstance(given, dict):
            raise BadLine('"chat_template_kwargs" must be an object', "chat_template_kwargs")
        for name in given or {}:
            if name in _NOT_FOR_TEMPLATES:
                raise BadLine(f'"chat_template_kwargs" must not hold "{name}"', "chat_template_kwargs")
        opens = flag(body, "add_generation_prompt", True)
        continues = flag(body, "continue_final_message", False)
        if opens and continues:
            raise BadLine(
                '"continue_final_message" goes with "add_generation_prompt": false, which is true unless said',
                "continue_final_message",
            )
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise BadLine("this model has several chat templates and none is the default", "url", "no_chat_template")
        final = self._mark_end(messages, name) if continues else None
        text = self._rendered(name, {
            **self._tokens, **(given or {}), "messages": messages, "tools": tools or None, "documents": None,
            "add_generation_prompt": opens,
        })  # fmt: skip
        return text if final is None else cut_at_tag(text, final)

    def _mark_end(self, messages, name):
        final = messages[-1].get("content")
        if final is None or "content" not in self._texts[name]:
            raise BadLine('"continue_final_message": the last message has no content that the template takes', "continue_final_message")
        messages[-1]["content"] = final + _CONTINUE_TAG
        return final

    def _rendered(self, name, values):
        pieces, size = [], 0
        try:
            for piece in self._templates[name].generate(values):
                size += len(piece.encode())
                if size > LONGEST_PROMPT:
                    raise BadLine(f"the chat template makes more than {LONGEST_PROMPT >> 20} MiB of this line", code="chat_template_error")
                pieces.append(piece)
            return "".join(pieces)
        except BadLine:
            raise
        except MemoryError:
            reason = "it needs too much memory"
        except UnicodeEncodeError:
            reason = "its text is no Unicode"
        except RecursionError:
            reason = "it calls itself without end"
        except Exception as problem:  # whatever a program of strangers raises
            reason = in_a_line(problem) or type(problem).__name__
        raise BadLine(f"the chat template fails on this line: {reason}", code="chat_template_error")


def cut_at_tag(text, final):
    tag = _CONTINUE_TAG.strip()
    if final.strip() not in text or tag not in text:
        raise BadLine('"continue_final_message": the template leaves out the last message', "continue_final_message")
    at = text.rindex(tag)
    return text[:at] if text[at : at + len(_CONTINUE_TAG)] == _CONTINUE_TAG else text[:at].rstrip()


class bounded_time:
    """SIGPROF ends the process after SECONDS of computing, also within a single operation of Python."""

    def __enter__(self):
        signal.setitimer(signal.ITIMER_PROF, SECONDS)

    def __exit__(self, *_):
        signal.setitimer(signal.ITIMER_PROF, 0)


def chat_body(raw):
    """The body of a chat line; None if it is none, or no line that the planner will read."""
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or document.get("url") != "/v1/chat/completions":
        return None
    body = document.get("body")
    return body if isinstance(body, dict) else None


def lines(file, number):
    """(number, offset behind it, text) of each line that may be a chat line. A longer one than is read is skipped."""
    while raw := file.readline(LONGEST_LINE + 2):
        whole = raw.endswith(b"\n") or len(raw) < LONGEST_LINE + 2
        if whole and CHAT_LINE.search(raw):
            yield number, file.tell(), raw
        while not whole:
            rest = file.readline(1 << 20)
            whole = not rest or rest.endswith(b"\n")
        number += 1


def main(model, source, output, offset, line, renders):
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        os.write(1, b"0 0\n")  # the template is compiled
        renderer = Renderer(model)
    except BadModel as problem:
        sys.stderr.write(f"{problem}\n")
        return 2
    with open(source, "rb") as file, open(output, "ab", buffering=0) as out:
        file.seek(int(offset))
        for number, behind, raw in lines(file, int(line)):
            if int(offset) == 0 and number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            os.write(1, f"{number} {behind}\n".encode())
            entry = entry_of(renderer, raw, renders == "yes")
            if entry is not None:
                out.write((json.dumps({"line": number, **entry}, ensure_ascii=False) + "\n").encode())
    return 0


def entry_of(renderer, raw, renders):
    with bounded_time():
        try:
            body = chat_body(raw)
            if body is None:
                return None
            if not renders:
                raise BadLine("the chat template was ended on too many lines before this one", code="chat_template_error")
            return {"prompt": renderer.prompt(body)}
        except BadLine as problem:
            return problem.entry
        except MemoryError:
            return BadLine("the line needs too much memory to be rendered", code="chat_template_error").entry


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
