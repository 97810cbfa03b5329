"""The front's end of the messages with a planner (planner/links/front_link.h has them), without a socket. The server's front and the Python
package both speak so; of the standard library alone, one thread.

A planner that starts, because the one before it died, asks for everything: all open requests are sent again. It computes the
same tokens, so what a stream has already is left out here, and its reader notices a pause and nothing else.
"""

import json
import secrets

_LAST_ID = (1 << 31) - 1  # from there on ids are the planner's, for further choices of a line
_LAST_LINE = (1 << 32) - 1
_AT_ONCE = 256  # requests of a message


def any_line():
    """The seed of a request that names none follows from its line's number: with any number, two that are equal differ."""
    return secrets.randbelow(_LAST_LINE) + 1


class OpenRequest:
    """A request that the planner has or will get. What comes of it goes to `put`: parts of a stream, then the result line (bytes)."""

    counts = 1  # among the requests that may be open

    def __init__(self, line, chat_entry, line_number, streams=False):
        """`chat_entry`: the rendered prompt of a chat line (planner/requests/chat_prompts.h), else None."""
        self.header = {"line": line_number, "stream": streams, "chat": chat_entry is not None}
        self.frames = [line] if chat_entry is None else [line, chat_entry]
        self.times = None  # seconds: waited, prompt, answer; once it is finished
        self.token_at = None  # when the planner had its first token, on CLOCK_MONOTONIC; likewise
        self.event_at = None  # when it had the token with which it first told of the request; likewise
        self._had = {}  # of each choice: bytes of its text, tokens whose ids or logprobs came

    @property
    def id(self):
        """It has one as soon as it is open."""
        return self.header["id"]

    @property
    def has_begun(self):
        """Whether a part of a stream came."""
        return bool(self._had)

    def put(self, event):
        raise NotImplementedError

    def take(self, event):
        """A part of a stream, without what was there before."""
        received, tokens = self._had.get(event.get("choice", 0), (0, 0))
        text = event["text"]
        if event["at"] < received:  # a planner that began it again
            text = text.encode()[received - event["at"] :].decode(errors="replace")  # with --absorption on it may be another
        first = event.get("first")
        if first is not None and event["tokens"] <= tokens:
            return
        received = max(received, event["at"] + len(event["text"].encode()))
        self._had[event.get("choice", 0)] = received, tokens if first is None else event["tokens"]
        if text or first is not None:
            event["text"] = text
            self.put(event)


class PlannerProtocol:
    def __init__(self, send):
        """`send(peer, frames)` must not block."""
        self.front = secrets.token_hex(8)
        self.open = {}
        self.counted = 0  # of the open requests
        self.facts = {}  # what the planner says of itself
        self.planners = 0  # that there were so far
        self.peer = None  # the address to answer to, while there is one
        self._planner = None
        self._next_id = 1
        self._to = send

    def submit(self, requests):
        for request in requests:
            request.header["id"] = self._number()
            self.open[request.id] = request
            self.counted += request.counts
        self._send_requests(requests)

    def cancel(self, requests):
        """Forgets those that are still open."""
        gone = [request.id for request in requests if "id" in request.header and self._forget(request.id) is not None]
        if gone:
            self._send({"cancel": gone})

    def take(self, peer, frames):
        """A message that came from `peer`."""
        for _ in self.taken(peer, frames):
            pass

    def taken(self, peer, frames):
        """The same in steps, for a caller with other work in between: streams that begin come first, since their clients have waited longest."""
        message = json.loads(frames[0])
        if "planner" in message:
            self.facts = message
            if (message["planner"], peer) != (self._planner, self.peer):
                self._greet(message["planner"], peer)
            return
        events = message.get("events", ()) if peer == self.peer else ()
        if beginnings := [event for event in events if self._begins(event)]:
            for event in beginnings:
                self._hand_out(event, frames)
            yield
            begun = {id(event) for event in beginnings}
            events = [event for event in events if id(event) not in begun]
        for event in events:
            self._hand_out(event, frames)

    def _begins(self, event):
        """Whether it is of a stream that has had nothing yet."""
        request = self.open.get(event["id"])
        return request is not None and "frame" not in event and not request.has_begun

    def lost(self):
        """The planner has gone; the next one says who it is."""
        self.peer = None

    def _number(self):
        while True:
            number = self._next_id
            self._next_id = number % _LAST_ID + 1
            if number not in self.open:
                return number

    def _forget(self, number):
        request = self.open.pop(number, None)
        self.counted -= 0 if request is None else request.counts
        return request

    def _greet(self, planner, peer):
        anew = planner != self._planner
        self.planners += anew
        self._planner, self.peer = planner, peer
        self._send({"front": self.front})
        if anew:
            self._send_requests(list(self.open.values()))

    def _hand_out(self, event, frames):
        request = self.open.get(event["id"])
        if request is None:
            return
        if "frame" not in event:
            request.take(event)
            return
        self._forget(event["id"])
        if "waited" in event:
            request.times = event["waited"], event["prefill"], event["decode"]
            request.token_at, request.event_at = event["token_at"], event["event_at"]
        request.put(frames[event["frame"]])

    def _send_requests(self, requests):
        for begin in range(0, len(requests), _AT_ONCE):
            part = requests[begin : begin + _AT_ONCE]
            self._send({"submit": [request.header for request in part]}, [frame for request in part for frame in request.frames])

    def _send(self, message, frames=()):
        # What is for a planner that has gone is dropped, and the next one gets it again.
        if self.peer is not None:
            self._to(self.peer, [json.dumps(message).encode(), *frames])
