"""The paths of the front, who may use them, and how refusals look."""

import base64
import contextlib
import hmac
import json
import time
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .bodies import read_object
from .completions import CHAT, COMPLETIONS, Completions, batch_line
from .errors import Refused
from .files import Files

_OPEN_PATHS = ("/health",)
_PAGES = ("/", "/report.json")  # for browsers, which ask for a name and a password: the key is the password


def application(settings, planner, chat, tokens, metrics, files, batches, live):
    completions = Completions(settings, planner, chat, metrics)
    paths = Files(settings, files, batches.is_needed)
    model = _Model(settings, planner, chat, tokens, completions)
    routes = [
        Route(COMPLETIONS, completions.completions, methods=["POST"]),
        Route(CHAT, completions.chat_completions, methods=["POST"]),
        Route("/v1/files", paths.files, methods=["GET", "POST"]),
        Route("/v1/files/{name}", paths.file, methods=["GET", "DELETE"]),
        Route("/v1/files/{name}/content", paths.content),
        Route("/v1/batches", batches.batches, methods=["GET", "POST"]),
        Route("/v1/batches/{name}", batches.batch),
        Route("/v1/batches/{name}/cancel", batches.cancel, methods=["POST"]),
        Route("/v1/models", model.models),
        Route("/v1/models/{name:path}", model.model),
        Route("/health", model.health),
        Route("/ping", model.health, methods=["GET", "POST"]),
        Route("/version", model.version),
        Route("/metrics", metrics.page),
        *live.routes(),
        Route("/tokenize", model.tokenize, methods=["POST"]),
        Route("/detokenize", model.detokenize, methods=["POST"]),
        Route("/tokenizer_info", model.tokenizer_info),
    ]
    handlers = {Refused: _refused, HTTPException: _http_exception, ClientDisconnect: _left, 500: _defect}
    return _Keyed(Starlette(routes=routes, exception_handlers=handlers), settings.api_key)


async def _refused(request, problem):
    return problem.response()


async def _http_exception(request, problem):
    if problem.status_code == 404:
        refused = Refused(404, f"there is no path {request.url.path[:200]}", code="not_found")
    elif problem.status_code == 405:
        refused = Refused(405, f"{request.method} is not for {request.url.path[:200]}", code="method_not_allowed", headers=problem.headers)
    else:
        refused = Refused(problem.status_code, str(problem.detail), code="bad_request")
    return refused.response()


async def _left(request, problem):
    return Response(status_code=499)


async def _defect(request, problem):
    """Says which defect it was and keeps what the client sent to itself."""
    return Refused(500, f"a defect of poise: {type(problem).__name__}", code="server_error").response()


class _Keyed:
    """Asks for the key, if there is one, before anything of a request is read."""

    def __init__(self, app, key):
        self._app = app
        self._key = None if key is None else key.encode()

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return
        if self._key is not None and scope["path"] not in _OPEN_PATHS and not self._holds_key(scope):
            refused = Refused(
                401, "a valid key is needed: Authorization: Bearer KEY", code="invalid_api_key",
                headers={"WWW-Authenticate": 'Basic realm="poise"' if scope["path"] in _PAGES else "Bearer", "Connection": "close"},
            )  # fmt: skip
            await refused.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _holds_key(self, scope):
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        word, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        if word.lower() == b"basic" and scope["path"] in _PAGES:
            with contextlib.suppress(ValueError):
                word, key = b"bearer", base64.b64decode(key.strip(), validate=True).partition(b":")[2]
        return hmac.compare_digest(key.strip(), self._key) and word.lower() == b"bearer"


class _Model:
    """What there is to know of the model, and its tokenizer."""

    def __init__(self, settings, planner, chat, tokens, completions):
        self._settings = settings
        self._planner = planner
        self._chat = chat
        self._tokens = tokens
        self._completions = completions
        self._since = int(time.time())

    def _described(self, name):
        return {
            "id": name, "object": "model", "created": self._since, "owned_by": "poise", "root": self._settings.model, "parent": None,
            "max_model_len": self._planner.facts.get("context"),
        }  # fmt: skip

    async def models(self, request):
        return JSONResponse({"object": "list", "data": [self._described(self._settings.names[0])]})

    async def model(self, request):
        name = request.path_params["name"]
        self._completions.check_model({"model": name})
        return JSONResponse(self._described(name))

    async def health(self, request):
        if not self._planner.ready.is_set():
            raise Refused(503, "the model is being loaded, or a process of the server replaced", code="not_ready", headers={"Retry-After": "1"})
        return Response(status_code=200)

    async def version(self, request):
        return JSONResponse({"version": self._settings.version})

    async def tokenize(self, request):
        _, body = await read_object(request, self._settings.max_body)
        self._completions.check_model(body)
        special = body.get("add_special_tokens")
        if "messages" in body:
            raw = json.dumps({name: value for name, value in body.items() if name != "add_special_tokens"}).encode()
            entry = json.loads(await self._chat.entry(batch_line(b'"-"', CHAT, raw)))
            if "error" in entry:
                raise Refused(400, entry["error"], entry["param"], entry["code"])
            text, special = entry["prompt"], bool(special)
        else:
            text, special = body.get("prompt"), special is not False
        if not isinstance(text, str):
            raise Refused(400, '"prompt" must be a string', "prompt")
        ids = await self._tokens.encode(text, special)
        return JSONResponse({"count": len(ids), "max_model_len": self._planner.facts.get("context"), "tokens": ids, "token_strs": None})

    async def detokenize(self, request):
        _, body = await read_object(request, self._settings.max_body)
        self._completions.check_model(body)
        ids = body.get("tokens")
        size = self._planner.facts.get("vocab_size", 1 << 31)
        if not isinstance(ids, list) or not all(type(one) is int and 0 <= one < size for one in ids):
            raise Refused(400, f'"tokens" must be a list of token ids; this model has those from 0 to {size - 1}', "tokens")
        return JSONResponse({"prompt": await self._tokens.decode(ids)})

    async def tokenizer_info(self, request):
        try:
            config = json.loads((Path(self._settings.model) / "tokenizer_config.json").read_text("utf-8"))
        except (OSError, ValueError):
            raise Refused(404, "this model has no tokenizer_config.json", code="not_found") from None
        return JSONResponse({"tokenizer_class": None, **config})
