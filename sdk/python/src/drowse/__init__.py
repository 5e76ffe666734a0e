"""Client of drowse: sandboxes that sleep, wake and fork.

`Drowse` and `AsyncDrowse` have the same methods.
"""

from . import types
from ._client_async import AsyncDrowse, AsyncSandbox
from ._client_sync import Drowse, Sandbox
from ._process_async import AsyncPort, AsyncProcess
from ._process_sync import Port, Process
from ._results import Completed, Exit, Lineage, Output, Versioned
from .errors import (
    APIError, CommandFailed, Conflict, ConnectionFailed, DeadlineExceeded, DrowseError, Forbidden, InvalidRequest, KeyReused, NotFound,
    PreconditionFailed, ProtocolError, ServerError, StreamLost, TooManyRequests, Unauthorized,
)

__all__ = [
    "APIError", "AsyncDrowse", "AsyncPort", "AsyncProcess", "AsyncSandbox", "CommandFailed", "Completed", "Conflict", "ConnectionFailed",
    "DeadlineExceeded", "Drowse", "DrowseError", "Exit", "Forbidden", "InvalidRequest", "KeyReused", "Lineage", "NotFound", "Output", "Port",
    "PreconditionFailed", "Process", "ProtocolError", "Sandbox", "ServerError", "StreamLost", "TooManyRequests", "Unauthorized", "Versioned", "types",
]
