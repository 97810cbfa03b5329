"""Refusals in OpenAI's form: {"error": {"message", "type", "param", "code"}}."""

from starlette.responses import JSONResponse

_TYPES = {401: "authentication_error", 404: "not_found_error", 405: "invalid_request_error", 429: "rate_limit_error"}


class Refused(Exception):
    """Ends a request with this status; `param` names the field at fault."""

    def __init__(self, status, message, param=None, code="invalid_value", headers=None):
        super().__init__(message)
        self.status = status
        self.headers = headers
        self.body = {"error": {"message": message, "type": error_type(status), "param": param, "code": code}}

    def response(self):
        return JSONResponse(self.body, self.status, self.headers)


def error_type(status):
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


def too_many(open_requests):
    return Refused(
        429, f"{open_requests} requests are open, as many as this server takes: try again in a moment", code="too_many_requests",
        headers={"Retry-After": "1"},
    )  # fmt: skip
