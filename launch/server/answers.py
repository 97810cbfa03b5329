"""A result line of the planner, taken apart without reading it as JSON: it may be long, and most of it goes to the client as it is."""

import re

# (*+ keeps no way back: custom_id may be long, and a way back takes 140 bytes for each of its characters.)
_LINE = re.compile(rb'\{"id":"poise-\d+","custom_id":(?P<custom_id>"[^"\\]*+(?:\\.[^"\\]*+)*+"|null),"response":\{"status_code":(?P<status>\d+),"request_id":"req-\d+","body":')
_BODY_ID = re.compile(rb'\{"id":"((?:chat)?cmpl-)\d+"')
_USAGE = re.compile(rb'"usage":\{"prompt_tokens":(\d+),"completion_tokens":(\d+),')
_END = b'},"error":null}'


class Answer:
    """`status` and `body` (JSON bytes) of a result line, and what it used."""

    def __init__(self, line):
        head = _LINE.match(line)
        if head is None or not line.endswith(_END):
            raise ValueError("the planner sent no result line")
        self.status = int(head["status"])
        self.custom_id = head["custom_id"]
        self.body = line[head.end() : -len(_END)]
        used = _USAGE.search(line, max(0, len(line) - 256)) if self.status == 200 else None
        if self.status == 200 and used is None:
            used = _USAGE.search(line)
        self.prompt_tokens, self.completion_tokens = map(int, used.groups()) if used else (0, 0)

    def body_named(self, name):
        """The body under the id `name`, which follows the kind of answer: "cmpl-" + name."""
        return _BODY_ID.sub(rb'{"id":"\g<1>' + name.encode() + b'"', self.body, count=1)

    def line_numbered(self, number):
        """The whole line as `poise run` writes it of line `number`."""
        head = b'{"id":"poise-%d","custom_id":%b,"response":{"status_code":%d,"request_id":"req-%d","body":'
        return head % (number, self.custom_id, self.status, number) + self.body_named(str(number)) + _END
