# Made from _process_async.py by generate.py.
"""Streams of processes and ports."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Callable
from typing import Any, cast

from ._sio import Condition, pieces
from ._http_sync import BINARY, CLOSE, TEXT, WebSocket
from .errors import ConnectionFailed, DrowseError, ProtocolError, StreamLost, error_of, field, object_of
from ._results import Completed, Exit, Output, exit_of

WINDOW = 256 << 10  # bytes of output that wait here at most, and of stdin that the server has not passed on
CHUNK = 32 << 10


class Process:
    """A process of a sandbox, and the stream of its input and output.

    Iterating gives its output as it comes. What is not taken stalls the process once 256 KiB wait here. Several
    tasks may use it, such as one that reads and one that writes. Leaving its `with` block ends the stream, which kills
    a process that is not detached.
    """

    def __init__(self, ws: WebSocket) -> None:
        self._ws, self._turn, self._receiving = ws, Condition(), False
        self._waiting: deque[Output] = deque()
        self._taken = self._told = self._sent = self._acked = self._held = 0
        self._error: Exception | None = None
        self.id = ""
        self.pid = 0
        self.offset = 0
        """The position in the output after the last byte that was taken: for attach."""
        self.exit: Exit | None = None
        """How it ended, once that is known."""

    def _say(self, kind: str, **more: Any) -> None:
        self._ws.send(TEXT, json.dumps({"type": kind, **more}).encode())

    def _begin(self, first: dict[str, Any] | None) -> None:
        try:
            if first is not None:
                self._say("start", window=WINDOW, **first)
            while not self.pid and self.exit is None:
                if self._error is not None:
                    raise self._error
                self._pump()
        except BaseException:
            self._ws.close()
            raise

    def _pump(self) -> None:
        """Receive one message."""
        try:
            kind, data = self._ws.receive()
        except ConnectionFailed as e:
            kind, data = CLOSE, str(e).encode()
        if kind == CLOSE:
            if self.exit is None and self._error is None:
                self._error = StreamLost("the stream ended before its process", self.offset)
        elif kind == BINARY:
            if len(data) > 1:
                self._held += len(data) - 1
                if self._held > WINDOW + CHUNK:
                    raise self._broken(ProtocolError("the server sends more output than was asked for"))
                self._waiting.append(Output("stderr" if data[0] == 2 else "stdout", data[1:]))
        else:
            try:
                self._control(object_of(data))
            except ProtocolError as e:
                raise self._broken(e) from None

    def _broken(self, e: ProtocolError) -> ProtocolError:
        self._error = self._error or e
        self._ws.close()
        return e

    def _control(self, m: dict[str, Any]) -> None:
        if m.get("type") == "started":
            self.pid, self.id, self.offset = field(m, "pid", int), str(m.get("process") or ""), field({"offset": 0, **m}, "offset", int)
            if self.pid <= 0:
                raise ProtocolError("the process has no number")
        elif m.get("type") == "ack":
            self._acked = field({"bytes": 0, **m}, "bytes", int)
        elif m.get("type") == "exit":
            self.exit = exit_of(field(m, "exit", dict))
        elif m.get("type") == "error":
            self._error = error_of(0, m.get("error"))

    def __iter__(self) -> Process:
        return self

    def _until(self, ready: Callable[[], Any]) -> Any:
        """Return what ready gives when it is not None. One caller at a time receives; the others wait for it."""
        while True:
            with self._turn:
                while (value := ready()) is None and self._receiving:
                    self._turn.wait()
                if value is not None:
                    return value
                self._receiving = True
            try:
                self._pump()
            finally:
                self._receiving = False
                with self._turn:
                    self._turn.notify_all()

    def __next__(self) -> Output:
        def take() -> tuple[Output | None, bool] | None:
            if not self._waiting:
                if self.exit is None and self._error is not None:
                    raise self._error
                return None if self.exit is None else (None, False)
            out = self._waiting.popleft()
            self._taken += len(out.data)
            self._held -= len(out.data)
            self.offset += len(out.data)
            tell = self._taken - self._told >= WINDOW // 2 and self.exit is None
            if tell:
                self._told = self._taken
            return out, tell

        out, tell = self._until(take)
        if out is None:
            raise StopIteration
        if tell:
            try:
                self._say("ack", bytes=self._taken)
            except ConnectionFailed:
                pass  # the next read says so
        return cast(Output, out)

    def write(self, data: bytes | str) -> None:
        """Write to stdin. It waits while 256 KiB are on their way: another task must take the output meanwhile."""
        if isinstance(data, str):
            data = data.encode()
        while data:
            n = self._room()
            if not n:
                raise self._error or DrowseError("the process has ended")
            part, data = data[:n], data[n:]
            self._sent += len(part)
            self._ws.send(BINARY, b"\0" + part)

    def _room(self) -> int:
        """Wait until stdin has room, and return for how many bytes; 0 if the process has ended."""

        def room() -> int | None:
            if self.exit is not None or self._error is not None:
                return 0
            n = min(CHUNK, WINDOW - (self._sent - self._acked))
            return n if n > 0 else None

        return int(self._until(room))

    def close_stdin(self) -> None:
        self._say("eof")

    def signal(self, number: int) -> None:
        """Send a signal to the process and its group."""
        self._say("signal", signal=int(number))

    def resize(self, rows: int, cols: int) -> None:
        """Set the size of the terminal."""
        self._say("resize", rows=rows, cols=cols)

    def detach(self) -> None:
        """End the stream, and leave a detached process running."""
        self._say("detach")
        self.close()

    def wait(self) -> Exit:
        """Wait for the end, and drop the output that was not taken."""
        for _ in self:
            pass
        assert self.exit is not None
        return self.exit

    def communicate(self, stdin: Any = None, *, limit: int = 16 << 20) -> Completed:
        """Send stdin, which is bytes, text, a file or an iterable of bytes, and return all output.

        More than `limit` bytes of output are an error.
        """
        out: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}

        def take() -> None:
            while self._waiting:
                o = self._waiting.popleft()
                self._taken += len(o.data)
                self._held -= len(o.data)
                self.offset += len(o.data)
                out[o.stream] += o.data
            if len(out["stdout"]) + len(out["stderr"]) > limit:
                raise DrowseError(f"the output has more than {limit} bytes: iterate over it, or raise the limit")

        def tell() -> None:
            if self._taken != self._told and self.exit is None:
                self._told = self._taken
                try:
                    self._say("ack", bytes=self._taken)
                except ConnectionFailed:
                    pass

        if stdin is not None:
            if isinstance(stdin, str):
                stdin = stdin.encode()
            for piece in pieces([stdin] if isinstance(stdin, bytes) else stdin):
                for i in range(0, len(piece), CHUNK):
                    part = piece[i : i + CHUNK]
                    while self._sent - self._acked + len(part) > WINDOW and self.exit is None and self._error is None:
                        self._pump()
                        take()
                        tell()
                    if self.exit is None and self._error is None:
                        self._sent += len(part)
                        self._ws.send(BINARY, b"\0" + part)
            if self.exit is None and self._error is None:
                self.close_stdin()
        while True:
            take()
            if self.exit is not None:
                return Completed(self.exit, bytes(out["stdout"]), bytes(out["stderr"]))
            if self._error is not None:
                raise self._error
            tell()
            self._pump()

    def close(self) -> None:
        """End the stream. A process that is not detached is killed."""
        self._ws.close()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Port:
    """A connection to a TCP port of a sandbox."""

    def __init__(self, ws: WebSocket) -> None:
        self._ws = ws
        self._ended = False

    def _control(self, data: bytes) -> str:
        m = object_of(data)
        if m.get("type") == "error":
            raise error_of(0, m.get("error"))
        return str(m.get("type"))

    def _begin(self) -> None:
        try:
            kind, data = self._ws.receive()
            if kind != TEXT or self._control(data) != "started":
                raise ConnectionFailed("the stream does not begin with a start")
        except BaseException:
            self._ws.close()
            raise

    def read(self) -> bytes:
        """Return some bytes; b"" at the end."""
        while not self._ended:
            kind, data = self._ws.receive()
            if kind == BINARY and data:
                return data
            if kind == CLOSE:
                raise ConnectionFailed("the connection was cut")
            if kind == TEXT and self._control(data) == "eof":
                self._ended = True
        return b""

    def write(self, data: bytes) -> None:
        for i in range(0, len(data), CHUNK):
            self._ws.send(BINARY, data[i : i + CHUNK])

    def close_write(self) -> None:
        """Tell the other end that no more comes."""
        self._ws.send(TEXT, b'{"type":"eof"}')

    def close(self) -> None:
        self._ws.close()

    def __enter__(self) -> Port:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[bytes]:
        while data := self.read():
            yield data
