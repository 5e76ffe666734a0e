"""HTTP/1.1 and WebSockets (RFC 9112, RFC 6455) as far as the API needs them. _http_sync.py is made from _http_async.py: see generate.py."""

from __future__ import annotations

import base64
import hashlib
import math
import os
import re
import secrets
import ssl
import struct
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

from ._aio import Stream, pieces, sleep
from .errors import APIError, ConnectionFailed, DeadlineExceeded, DrowseError, ProtocolError, error_of, object_of

MAX_HEADER = 64 << 10
MAX_MESSAGE = 1 << 20
MAX_DOCUMENT = 64 << 20
MAX_LINE = 16 << 20
MAX_ERROR = 1 << 20
KEPT = 8  # connections that wait for their next request
KEPT_FOR = 30.0  # seconds
LONGEST_PAUSE = 5.0  # seconds that the server may ask to wait before a retry


def number(text: str, base: int = 10) -> int:
    """Return a length, which has digits alone."""
    if not re.fullmatch("[0-9A-Fa-f]{1,15}" if base == 16 else "[0-9]{1,18}", text):
        raise ConnectionFailed("the server does not speak HTTP/1.1")
    return int(text, base)


class AsyncResponse:
    """An answer whose body is read as it comes."""

    def __init__(self, http: AsyncHTTP, stream: Stream, status: int, headers: dict[str, str], rest: bytes, bodiless: bool) -> None:
        self.status, self.headers = status, headers
        self._http, self._stream, self._buf = http, stream, bytearray(rest)
        self._chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        length = headers.get("content-length")
        self._left: int | None = 0 if bodiless else None if self._chunked or length is None else number(length)
        self._keeps = headers.get("connection", "").lower() != "close" and (self._chunked or self._left is not None)
        self._over = bodiless

    async def _more(self) -> bool:
        data = await self._stream.read()
        self._buf += data
        return bool(data)

    async def _line(self) -> bytes:
        while (at := self._buf.find(b"\r\n")) < 0:
            if len(self._buf) > MAX_HEADER or not await self._more():
                raise ConnectionFailed("the answer was cut")
        line = bytes(self._buf[:at])
        del self._buf[: at + 2]
        return line

    async def read(self) -> bytes:
        """Return some bytes of the body; b"" at the end."""
        while not self._over:
            if self._chunked and not self._left:
                if self._left == 0:
                    await self._line()  # after a chunk
                self._left = number((await self._line()).split(b";")[0].decode("latin-1").strip(), 16)
                if self._left == 0:
                    while await self._line():
                        pass
                    break
            elif self._left == 0:
                break
            if not self._buf and not await self._more():
                if self._left is None:
                    break
                raise ConnectionFailed("the answer was cut")
            n = len(self._buf) if self._left is None else min(self._left, len(self._buf))
            data = bytes(self._buf[:n])
            del self._buf[:n]
            if self._left is not None:
                self._left -= n
            return data
        self._over = True
        return b""

    async def document(self, most: int = MAX_DOCUMENT) -> bytes:
        """Return the whole body."""
        out = bytearray()
        try:
            while piece := await self.read():
                out += piece
                if len(out) > most:
                    raise DrowseError(f"the answer has more than {most} bytes: read it as a stream")
            return bytes(out)
        finally:
            self.close()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            while piece := await self.read():
                yield piece
        finally:
            self.close()

    async def lines(self) -> AsyncIterator[Any]:
        """Yield the objects of an answer that is lines of JSON, without the empty lines that keep it open."""
        rest = bytearray()
        try:
            while piece := await self.read():
                *whole, last = piece.split(b"\n")
                if whole:
                    whole[0] = bytes(rest) + whole[0]
                    rest.clear()
                rest += last
                if len(rest) > MAX_LINE:
                    raise ProtocolError("a line of the answer is too long")
                for line in whole:
                    if line.strip():
                        yield object_of(line)
        finally:
            self.close()

    def close(self) -> None:
        """Keep the connection for the next request if the answer was read to its end, else end it."""
        stream, self._stream = self._stream, None  # type: ignore[assignment]
        if stream is None:
            return
        if self._over and self._keeps and not self._buf:
            self._http.keep(stream)
        else:
            stream.close()
        self._over = True

    def detach(self) -> tuple[Stream, bytes]:
        """Return the connection, which has changed its protocol, and what was read of it."""
        stream, self._stream = self._stream, None  # type: ignore[assignment]
        return stream, bytes(self._buf)


class AsyncHTTP:
    """Sends requests. `url` is http://, https:// or unix:///path/of/api.sock."""

    def __init__(self, url: str, token: str, timeout: float | None, retries: int, tls: ssl.SSLContext | None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https", "unix") or (parts.scheme != "unix" and not parts.hostname):
            raise ValueError(f"url {url!r}: use http://HOST:PORT, https://HOST or unix:///path/of/api.sock")
        self.timeout, self.retries = timeout, retries
        self._token, self._base, self._tls = token, parts.path.rstrip("/"), None
        self._host = parts.netloc.rpartition("@")[2]
        if parts.scheme == "unix":
            self._where: tuple[str, int] | str = parts.path
            self._base, self._host = "", "localhost"
        else:
            self._where = (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
            if parts.scheme == "https":
                self._tls = tls or ssl.create_default_context()
        self._kept: list[tuple[float, Stream]] = []
        self._closed = False

    def keep(self, stream: Stream) -> None:
        if self._closed or len(self._kept) >= KEPT:
            stream.close()
        else:
            self._kept.append((time.monotonic(), stream))

    def close(self) -> None:
        self._closed = True
        while self._kept:
            self._kept.pop()[1].close()

    async def _connect(self, deadline: float | None) -> Stream:
        while True:
            try:
                since, stream = self._kept.pop()
            except IndexError:
                return await Stream.open(self._where, self._tls, deadline)
            if time.monotonic() - since < KEPT_FOR and stream.idle():
                stream.deadline = deadline
                return stream
            stream.close()

    async def request(
        self, method: str, path: str, *, headers: dict[str, str] | None = None, body: Any = None, timeout: float | None = None,
        retry: bool = False,
    ) -> AsyncResponse:
        """Send a request, and return its answer once its header is there; raise APIError for one of 400 and more.

        `timeout` bounds the time until the header, of all tries together. With `retry`, a broken connection and an
        answer that says when to try again lead to another try.
        """
        if self._closed:
            raise DrowseError("the client is closed")
        timeout = self.timeout if timeout is None else timeout
        deadline = None if timeout is None or timeout == math.inf else time.monotonic() + timeout
        tries = self.retries if retry and (body is None or isinstance(body, bytes)) else 0
        while True:
            pause = 0.05
            try:
                return await self._once(method, path, headers or {}, body, deadline)
            except ConnectionFailed:
                if tries <= 0:
                    raise
            except APIError as e:
                if tries <= 0 or e.retry_after is None or e.retry_after > LONGEST_PAUSE:
                    raise
                pause = e.retry_after
            tries -= 1
            if deadline is not None and time.monotonic() + pause > deadline:
                raise DeadlineExceeded("the time is up")
            await sleep(pause)

    async def _once(self, method: str, path: str, headers: dict[str, str], body: Any, deadline: float | None) -> AsyncResponse:
        h = {"Host": self._host, "User-Agent": "drowse-python", **headers}
        if self._token:
            h["Authorization"] = "Bearer " + self._token
        whole = body is None or isinstance(body, bytes)
        if not whole:
            h["Transfer-Encoding"] = "chunked"
        elif body is not None or method in ("POST", "PUT", "PATCH"):
            h["Content-Length"] = str(len(body or b""))
        for name, value in h.items():
            if any(c in value for c in "\r\n\0"):
                raise ValueError(f"the header {name} has a line's end")
        head = f"{method} {self._base}{path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in h.items()) + "\r\n"
        stream = await self._connect(deadline)
        done = False
        try:
            try:
                await stream.write(head.encode("latin-1") + (body or b"" if whole else b""))
                if not whole:
                    stream.deadline = None  # an upload takes its time
                    async for piece in pieces(body):
                        for i in range(0, len(piece), MAX_MESSAGE):
                            part = piece[i : i + MAX_MESSAGE]
                            await stream.write(b"%x\r\n%b\r\n" % (len(part), part))
                    await stream.write(b"0\r\n\r\n")
            except ConnectionFailed:
                if whole:
                    raise
                # The server may have answered before the end of the body.
            answer = await self._head(stream, method)
            if answer.status < 300:
                stream.deadline = None if answer.headers.get("content-type") != "application/json" else deadline
                done = True
                return answer
            if answer.status < 400:
                raise ProtocolError(f"the server answers with HTTP status {answer.status}")
            text = await answer.document(MAX_ERROR)
            done = True
        finally:
            if not done:
                stream.close()
        try:
            error = object_of(text).get("error")
        except ProtocolError:
            error = None  # it is from something before the server
        after = answer.headers.get("retry-after", "")
        raise error_of(answer.status, error, float(after) if re.fullmatch("[0-9]{1,9}", after) else None)

    async def _head(self, stream: Stream, method: str) -> AsyncResponse:
        buf = bytearray()
        while (end := buf.find(b"\r\n\r\n")) < 0:
            data = await stream.read()
            if not data:
                raise ConnectionFailed("the connection ended before the answer")
            if len(buf) > MAX_HEADER:
                raise ProtocolError("the answer has too long a header")
            buf += data
        first, *lines = bytes(buf[:end]).decode("latin-1").split("\r\n")
        words = first.split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not re.fullmatch("[0-9]{3}", words[1]):
            raise ConnectionFailed("the server does not speak HTTP/1.1")
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        status = int(words[1])
        bodiless = method == "HEAD" or status in (101, 204, 304)
        return AsyncResponse(self, stream, status, headers, bytes(buf[end + 4 :]), bodiless)

    async def websocket(self, path: str, timeout: float | None = None) -> AsyncWebSocket:
        key = base64.b64encode(secrets.token_bytes(16)).decode()
        headers = {
            "Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": key,
            "Sec-WebSocket-Protocol": "drowse.v1",
        }
        answer = await self.request("GET", path, headers=headers, timeout=timeout, retry=True)
        want = base64.b64encode(hashlib.sha1((key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()).digest()).decode()
        stream, rest = answer.detach()
        if answer.status != 101 or answer.headers.get("sec-websocket-accept") != want:
            stream.close()
            raise ConnectionFailed("the server does not open a WebSocket")
        return AsyncWebSocket(stream, rest)


TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10


class AsyncWebSocket:
    """The client's end of a WebSocket without extensions. One receives at a time; any may send."""

    def __init__(self, stream: Stream, rest: bytes) -> None:
        self._stream, self._buf = stream, bytearray(rest)
        self._parts, self._kind = bytearray(), 0
        stream.deadline = None

    async def send(self, kind: int, data: bytes) -> None:
        n = len(data)
        head = bytes([0x80 | kind])
        if n < 126:
            head += bytes([0x80 | n])
        elif n < 1 << 16:
            head += struct.pack(">BH", 0x80 | 126, n)
        else:
            head += struct.pack(">BQ", 0x80 | 127, n)
        mask = os.urandom(4)
        pad = int.from_bytes(mask * (n // 4 + 1), "little") & ((1 << 8 * n) - 1)
        masked = (int.from_bytes(data, "little") ^ pad).to_bytes(n, "little")
        await self._stream.write(head + mask + masked)

    def _frame(self) -> tuple[int, bool, bytes] | None:
        """Take a whole frame from what was read."""
        b = self._buf
        if len(b) < 2:
            return None
        n, at = b[1] & 0x7F, 2
        if n == 126:
            at = 4
            n = int.from_bytes(b[2:4], "big") if len(b) >= 4 else 0
        elif n == 127:
            at = 10
            n = int.from_bytes(b[2:10], "big") if len(b) >= 10 else 0
        if b[1] & 0x80 or b[0] & 0x70 or n + len(self._parts) > MAX_MESSAGE:
            raise ConnectionFailed("the server breaks the rules of WebSockets")
        if len(b) < at + n:
            return None
        kind, final, data = b[0] & 0x0F, bool(b[0] & 0x80), bytes(b[at : at + n])
        del b[: at + n]
        return kind, final, data

    async def receive(self) -> tuple[int, bytes]:
        """Return the next message, TEXT or BINARY, or CLOSE at the end. A call that is canceled loses none."""
        while True:
            frame = self._frame()
            if frame is None:
                data = await self._stream.read()
                if not data:
                    return CLOSE, b""
                self._buf += data
                continue
            kind, final, data = frame
            # RFC 6455, section 5.4 and 5.5: messages do not mix, and control frames are whole and short.
            if kind >= CLOSE and (not final or len(data) > 125) or kind < CLOSE and (kind == 0) != (self._kind != 0):
                raise ConnectionFailed("the server breaks the rules of WebSockets")
            if kind == PING:
                await self.send(PONG, data)
            elif kind == CLOSE:
                return CLOSE, data
            elif kind in (0, TEXT, BINARY):
                self._kind = kind or self._kind
                self._parts += data
                if final:
                    out, of = bytes(self._parts), self._kind
                    self._parts, self._kind = bytearray(), 0
                    return of, out
            else:
                raise ConnectionFailed("the server breaks the rules of WebSockets")

    def close(self) -> None:
        self._stream.close()
