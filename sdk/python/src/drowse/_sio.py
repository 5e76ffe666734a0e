"""Connections for threads. _aio.py has the same for asyncio."""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from .errors import ConnectionFailed, DeadlineExceeded

Condition = threading.Condition
sleep = time.sleep
PIECE = 64 << 10


def in_thread(f: Callable[..., Any], *args: Any) -> Any:
    return f(*args)


class Stream:
    """A connection. `deadline` is when its operations fail, as time.monotonic()."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._writing = threading.Lock()
        self.deadline: float | None = None

    @classmethod
    def open(cls, where: tuple[str, int] | str, tls: ssl.SSLContext | None, deadline: float | None) -> Stream:
        sock = None
        try:
            if isinstance(where, str):
                sock = socket.socket(socket.AF_UNIX)
                sock.settimeout(left(deadline))
                sock.connect(where)
            else:
                sock = socket.create_connection(where, timeout=left(deadline))
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if tls is not None:
                    sock = tls.wrap_socket(sock, server_hostname=where[0])
        except OSError as e:
            if sock is not None:
                sock.close()
            if isinstance(e, TimeoutError):
                raise DeadlineExceeded(f"connecting to {where}: the time is up") from None
            raise ConnectionFailed(f"connecting to {where}: {e}") from e
        s = cls(sock)
        s.deadline = deadline
        return s

    def idle(self) -> bool:
        """Report whether the connection still stands, and nothing waits to be read."""
        try:
            return not select.select([self._sock], [], [], 0)[0]
        except (OSError, ValueError):
            return False

    def read(self) -> bytes:
        """Return some bytes; b"" at the end."""
        try:
            self._sock.settimeout(left(self.deadline))
            return self._sock.recv(PIECE)
        except TimeoutError:
            raise DeadlineExceeded("the time is up") from None
        except OSError as e:
            raise ConnectionFailed(f"reading: {e}") from e

    def write(self, data: bytes) -> None:
        try:
            with self._writing:  # whole messages of several threads
                self._sock.settimeout(left(self.deadline))
                self._sock.sendall(data)
        except TimeoutError:
            raise DeadlineExceeded("the time is up") from None
        except OSError as e:
            raise ConnectionFailed(f"writing: {e}") from e

    def close(self) -> None:
        try:
            self._sock.shutdown(socket.SHUT_RDWR)  # a read in another thread ends
        except OSError:
            pass
        self._sock.close()


def left(deadline: float | None) -> float | None:
    # 0 would make the socket one that does not wait.
    return None if deadline is None else max(1e-6, deadline - time.monotonic())


def pieces(body: Any) -> Iterator[bytes]:
    """Yield a body, which is a file or an iterable, in pieces."""
    if hasattr(body, "read"):
        while piece := body.read(PIECE):
            yield piece
    else:
        yield from body
