"""/v1/files: what clients upload and what batches write, each a file of bytes and one of facts under RUN/files."""

import asyncio
import json
import os
import re
import secrets
import shutil
import tempfile
import time
from pathlib import Path

from starlette.formparsers import MultiPartException
from starlette.responses import FileResponse, JSONResponse

from supervisor.shared.files import publish_file, read_json, remove, replace_file

from .bodies import bounded_receive, check_length
from .errors import Refused

_ID = re.compile(r"file-[0-9a-f]{24}")
_LONGEST_NAME = 255
_PURPOSES = ("batch", "batch_output", "assistants", "fine-tune", "user_data", "evals", "vision")


def new_digits():
    """24 of an id: those of what comes later are higher."""
    return f"{time.time_ns():016x}{secrets.token_hex(4)}"


class FileStore:
    def __init__(self, folder):
        self._folder = Path(folder)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        tempfile.tempdir = str(self._folder)  # uploads lie on the same disk until they are whole
        for left in self._folder.iterdir():  # of files that a crash kept from being whole
            whole = left.suffix == ".json" or left.with_name(f"{left.name}.json").exists()
            if not whole or left.suffix == ".part":
                remove(left)

    @staticmethod
    def new_id():
        return f"file-{new_digits()}"

    def path(self, name):
        return self._folder / name

    def part(self, name):
        return self._folder / f"{name}.part"

    def facts(self, name):
        """404 if there is no such file."""
        facts = read_json(self._folder / f"{name}.json") if _ID.fullmatch(name) else {}
        if not facts:
            raise Refused(404, f"there is no file {name[:64]}", code="file_not_found")
        return facts

    def publish(self, name, filename, purpose):
        """The part of that name becomes a file, whole or not at all. Its facts come last: without them it is not there."""
        publish_file(self.part(name), self.path(name))
        facts = {
            "id": name, "object": "file", "bytes": self.path(name).stat().st_size, "created_at": int(time.time()), "expires_at": None,
            "filename": filename, "purpose": purpose, "status": "processed", "status_details": None,
        }  # fmt: skip
        replace_file(self._folder / f"{name}.json", json.dumps(facts))
        return facts

    def delete(self, name):
        remove(self._folder / f"{name}.json")
        remove(self.path(name))

    def all(self):
        """Newest first."""
        facts = [read_json(path) for path in self._folder.glob("file-*.json")]
        return sorted((one for one in facts if one), key=lambda one: (one["created_at"], one["id"]), reverse=True)


class Files:
    """The paths."""

    def __init__(self, settings, store, is_needed):
        """`is_needed(id)`: whether a batch still reads it."""
        self._most = settings.max_file
        self._store = store
        self._is_needed = is_needed

    async def files(self, request):
        return await self._upload(request) if request.method == "POST" else self._list(request)

    async def _upload(self, request):
        check_length(request, self._most)
        request._receive = bounded_receive(request, self._most)
        try:
            async with request.form(max_files=1, max_fields=16) as form:
                file, purpose = form.get("file"), form.get("purpose")
                if not hasattr(file, "filename"):
                    raise Refused(400, '"file" is missing', "file", "missing_required_parameter")
                if purpose not in _PURPOSES:
                    raise Refused(400, f'"purpose" must be one of {", ".join(_PURPOSES)}', "purpose")
                facts = await asyncio.to_thread(self._keep, self._store.new_id(), file, purpose)
        except MultiPartException as problem:
            raise Refused(400, f"the body is no multipart form: {problem.message}", code="invalid_form") from None
        except OSError as problem:
            raise Refused(
                507, f"the file cannot be kept: {problem.strerror or problem}", code="insufficient_storage", headers={"Connection": "close"}
            ) from None
        return JSONResponse(facts)

    def _keep(self, name, file, purpose):
        try:
            with open(self._store.part(name), "xb") as to:
                os.fchmod(to.fileno(), 0o600)
                shutil.copyfileobj(file.file, to, 1 << 20)
            return self._store.publish(name, (file.filename or "upload")[-_LONGEST_NAME:], purpose)
        except OSError:
            remove(self._store.part(name))
            self._store.delete(name)
            raise

    def _list(self, request):
        purpose = request.query_params.get("purpose")
        return page_of(request, [one for one in self._store.all() if purpose in (None, one["purpose"])], 10_000)

    async def file(self, request):
        facts = self._store.facts(request.path_params["name"])
        if request.method != "DELETE":
            return JSONResponse(facts)
        if self._is_needed(facts["id"]):
            raise Refused(409, f"a batch still needs {facts['id']}: cancel it first", code="file_in_use")
        self._store.delete(facts["id"])
        return JSONResponse({"id": facts["id"], "object": "file", "deleted": True})

    async def content(self, request):
        facts = self._store.facts(request.path_params["name"])
        return FileResponse(self._store.path(facts["id"]), media_type="application/octet-stream")


def page_of(request, objects, most):
    """A page of a list, as OpenAI's: `after` an id, at most `limit`."""
    after, limit = request.query_params.get("after"), request.query_params.get("limit", "")
    if limit and not (limit.isascii() and limit.isdigit() and len(limit) < 9 and 1 <= int(limit) <= most):
        raise Refused(400, f'"limit" must be a number from 1 to {most}', "limit")
    if after is not None:
        place = next((place for place, one in enumerate(objects) if one["id"] == after), None)
        if place is None:
            raise Refused(400, f'"after": there is no {after[:64]}', "after")
        objects = objects[place + 1 :]
    shown = objects[: int(limit) if limit else 20 if most <= 100 else most]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return JSONResponse({"object": "list", "data": shown, **ends, "has_more": len(objects) > len(shown)})
