"""Errors of the client."""

from __future__ import annotations

import json
from typing import Any, List


class DrowseError(Exception):
    """The root of all errors of this package."""


class ConnectionFailed(DrowseError, ConnectionError):
    """The server cannot be reached, or the connection broke. What was asked for may have been done."""


class DeadlineExceeded(DrowseError, TimeoutError):
    """The call's own timeout is over. What was asked for may have been done."""


class ProtocolError(DrowseError):
    """The answer is none of this API's: the address is another server's, or of another version."""


class StreamLost(ConnectionFailed):
    """The stream of a process ended before the process. A detached one goes on: attach with `offset`."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.offset = offset


class CommandFailed(DrowseError):
    """A command ended other than with exit code 0, and the caller asked for an error then."""

    def __init__(self, message: str, result: Any) -> None:
        super().__init__(message)
        self.result = result


class APIError(DrowseError):
    """An error that the server answered with.

    `code` is for programs, `remedy` says what to do, `field` is what is wrong in the request ("spec.memory_mib"), if that
    is one thing. `status` is the HTTP status; of an error in a stream, 0.
    """

    def __init__(self, status: int, error: dict[str, Any], retry_after: float | None = None) -> None:
        self.status = status
        def text_of(name: str) -> str:
            value = error.get(name)
            return value if isinstance(value, str) else ""

        self.code = text_of("code") or "error"
        self.message, self.remedy, self.field, self.op, self.sandbox = map(text_of, ("message", "remedy", "field", "op", "sandbox"))
        self.retry_after = retry_after
        """Seconds to wait before another try, if the server says so."""
        text = self.message or self.code
        super().__init__(f"{text} ({self.remedy})" if self.remedy else text)


class InvalidRequest(APIError):
    """400: the request is wrong."""


class Unauthorized(APIError):
    """401: no token, or one that is unknown or expired."""


class Forbidden(APIError):
    """403: the token lacks the right."""


class NotFound(APIError):
    """404: there is no such sandbox, file, snapshot, image or volume, or it is another owner's."""


class Conflict(APIError):
    """409: the state does not allow it, or the name is taken."""


class PreconditionFailed(APIError):
    """412: it has changed since it was read."""


class KeyReused(APIError):
    """422: another request had this idempotency key."""


class TooManyRequests(APIError):
    """429: too many requests, or the owner's limit is reached."""


class ServerError(APIError):
    """5xx: the host or the guest has failed, or has no room at present."""


_classes = {
    400: InvalidRequest, 401: Unauthorized, 403: Forbidden, 404: NotFound, 409: Conflict, 412: PreconditionFailed,
    422: KeyReused, 429: TooManyRequests,
}

# Codes of errors in streams, which have no status. Others count as the server's.
_codes = {
    "invalid": InvalidRequest, "guest-invalid": InvalidRequest, "unauthorized": Unauthorized, "forbidden": Forbidden,
    "not-found": NotFound, "guest-not-found": NotFound, "exists": Conflict, "running": Conflict, "not-running": Conflict, "stopped": Conflict,
    "expired": Conflict, "crashed": Conflict, "ended": Conflict, "guest-exists": Conflict, "guest-denied": Conflict,
    "guest-refused": Conflict, "too-many": TooManyRequests, "owner-limit": TooManyRequests,
}


def object_of(text: bytes) -> dict[str, Any]:
    """Return the JSON object that a text is."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ProtocolError(f"the answer is no JSON: {text[:80]!r}") from None
    return field({"": value}, "", dict)


def field(doc: dict[str, Any], name: str, kind: Any = str) -> Any:
    """Return a field of an answer that must be there."""
    value = doc.get(name)
    if not isinstance(value, kind):
        raise ProtocolError(f"the answer has no {name!r} as it should be: {str(doc)[:80]}")
    return value


def items(doc: dict[str, Any], name: str) -> List[Any]:
    """Return the objects of a list in an answer; null is an empty one."""
    value = field(doc, name, (list, type(None))) or []
    if not all(isinstance(one, dict) for one in value):
        raise ProtocolError(f"the answer has other things than objects in {name!r}")
    return value


def error_of(status: int, error: Any, retry_after: float | None = None) -> APIError:
    """Return the error for an answer."""
    if not isinstance(error, dict):
        error = {"message": f"HTTP status {status}" if status else ""}
    if status:
        kind = _classes.get(status, ServerError if status >= 500 else APIError)
    else:
        kind = _codes.get(str(error.get("code")), ServerError)
    return kind(status, error, retry_after)
