"""Connections for asyncio. _sio.py has the same for threads."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from typing import Any

from .errors import ConnectionFailed, DeadlineExceeded

Condition = asyncio.Condition
sleep = asyncio.sleep
in_thread = asyncio.to_thread
PIECE = 64 << 10


class Stream:
    """A connection. `deadline` is when its operations fail, as time.monotonic()."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.deadline: float | None = None

    @classmethod
    async def open(cls, where: tuple[str, int] | str, tls: ssl.SSLContext | None, deadline: float | None) -> Stream:
        try:
            async with asyncio.timeout(left(deadline)):
                if isinstance(where, str):
                    ends = await asyncio.open_unix_connection(where, limit=PIECE)
                else:
                    ends = await asyncio.open_connection(*where, ssl=tls, limit=PIECE)
        except TimeoutError:
            raise DeadlineExceeded(f"connecting to {where}: the time is up") from None
        except OSError as e:
            raise ConnectionFailed(f"connecting to {where}: {e}") from e
        s = cls(*ends)
        s.deadline = deadline
        return s

    def idle(self) -> bool:
        """Report whether the connection still stands, and nothing waits to be read."""
        return not self._reader.at_eof() and not self._writer.is_closing() and self._reader.exception() is None

    async def read(self) -> bytes:
        """Return some bytes; b"" at the end. A call that is canceled loses none."""
        try:
            async with asyncio.timeout(left(self.deadline)):
                return await self._reader.read(PIECE)
        except TimeoutError:
            raise DeadlineExceeded("the time is up") from None
        except OSError as e:
            raise ConnectionFailed(f"reading: {e}") from e

    async def write(self, data: bytes) -> None:
        try:
            self._writer.write(data)
            async with asyncio.timeout(left(self.deadline)):
                await self._writer.drain()
        except TimeoutError:
            raise DeadlineExceeded("the time is up") from None
        except (OSError, RuntimeError) as e:
            raise ConnectionFailed(f"writing: {e}") from e

    def close(self) -> None:
        self._writer.transport.abort()


def left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


async def pieces(body: Any) -> AsyncIterator[bytes]:
    """Yield a body, which is a file or an iterable, in pieces."""
    if hasattr(body, "read"):
        while piece := await asyncio.to_thread(body.read, PIECE):
            yield piece
    elif hasattr(body, "__aiter__"):
        async for piece in body:
            yield piece
    else:
        for piece in body:
            yield piece
