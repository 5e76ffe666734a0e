"""Servers that send garbage, too much or half of it: errors are of the package, and no connection stays."""

from __future__ import annotations

import base64
import hashlib
import re
import socketserver
import threading
import unittest
from collections.abc import Callable, Iterator
from typing import Any

import drowse

JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def chunks(of: bytes) -> Callable[[], Iterator[bytes]]:
    def endless() -> Iterator[bytes]:
        while True:
            yield of

    return endless


def frame(kind: int, data: bytes, first: int = 0x80) -> bytes:
    n = len(data)
    return bytes([first | kind]) + (bytes([n]) if n < 126 else b"\x7e" + n.to_bytes(2, "big")) + data


STARTED = frame(1, b'{"type":"started","pid":7}')

ANSWERS: dict[str, Any] = {
    "nothing": b"",
    "no HTTP": b"SSH-2.0-OpenSSH\r\n\r\n",
    "a status of letters": b"HTTP/1.1 abc OK\r\n\r\n",
    "an endless header": chunks(b"X: y\r\n" * 1000),
    "no number as a length": JSON + b"Content-Length: many\r\n\r\n{}",
    "a length below 0": JSON + b"Content-Length: -5\r\n\r\n{}",
    "a chunk below 0": JSON + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n{}",
    "a chunk of letters": JSON + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}",
    "half of the body": JSON + b"Content-Length: 100\r\n\r\n{",
    "no JSON": JSON + b"Content-Length: 6\r\n\r\n<html>",
    "JSON that is no object": JSON + b"Content-Length: 2\r\n\r\n[]",
    "deep JSON": JSON + b"Content-Length: 500000\r\n\r\n" + b"[" * 500000,
    "no UTF-8": JSON + b'Content-Length: 9\r\n\r\n{"a":"\xff"}',
    "an object without a name": JSON + b"Content-Length: 2\r\n\r\n{}",
    "a name that is a number": JSON + b'Content-Length: 10\r\n\r\n{"name":1}',
    "a redirect": b"HTTP/1.1 307 Go\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
    "an error that is no object": b'HTTP/1.1 404 No\r\nContent-Length: 15\r\n\r\n{"error":"gone"}'[:-1],
    "an error whose code is a list": b'HTTP/1.1 500 No\r\nContent-Length: 21\r\n\r\n{"error":{"code":[]}}',
    "an endless error": lambda: iter([b"HTTP/1.1 500 No\r\n\r\n"] + [bytes(1 << 16)] * 64),
}

STREAMS: dict[str, Any] = {
    "no JSON": STARTED + frame(1, b"<"),
    "a list": STARTED + frame(1, b"[]"),
    "a process without a number": frame(1, b'{"type":"started","pid":0}'),
    "an exit without a code": STARTED + frame(1, b'{"type":"exit","exit":{}}'),
    "an exit that is a list": STARTED + frame(1, b'{"type":"exit","exit":[]}'),
    "an error that is a text": STARTED + frame(1, b'{"type":"error","error":"x"}'),
    "a masked frame": STARTED + b"\x82\x85abcdhello",
    "an enormous frame": STARTED + b"\x82\x7f\x00\xff\xff\xff\xff\xff\xff\xff",
    "a rest of no message": STARTED + frame(0, b"\x01hello"),
    "a message within another": STARTED + frame(2, b"\x01hello", 0) + frame(2, b"\x01hello"),
    "a ping in parts": STARTED + frame(9, b"x", 0),
    "an unknown kind": STARTED + frame(5, b""),
    "a reserved bit": STARTED + frame(2, b"\x01x", 0xC0),
    "half of a frame": STARTED + frame(2, b"\x01hello")[:-2],
    "an end without an exit": STARTED + frame(8, b""),
}


class Handler(socketserver.BaseRequestHandler):
    """Gives the answer of the server, and waits for the end of the connection."""

    def handle(self) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            piece = self.request.recv(65536)
            if not piece:
                return
            head += piece
        try:
            key = re.search(rb"Sec-WebSocket-Key: (\S+)", head)
            if key:
                accept = base64.b64encode(hashlib.sha1(key[1] + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
                self.request.sendall(b"HTTP/1.1 101 Go\r\nSec-WebSocket-Accept: " + accept + b"\r\n\r\n")
                self.request.recv(65536)  # the start
            answer = self.server.answer  # type: ignore[attr-defined]
            for piece in answer() if callable(answer) else [answer]:
                self.request.sendall(piece)
            if not callable(answer):
                self.request.shutdown(1)
            while self.request.recv(65536):
                pass
        except OSError:
            pass
        finally:
            with self.server.count:  # type: ignore[attr-defined]
                self.server.ended += 1  # type: ignore[attr-defined]
                self.server.count.notify_all()  # type: ignore[attr-defined]


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.count, self.begun, self.ended = threading.Condition(), 0, 0
        super().__init__(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def process_request(self, request: Any, client_address: Any) -> None:
        self.begun += 1
        super().process_request(request, client_address)

    def no_connections(self) -> bool:
        """Wait until the client has closed all it has opened."""
        with self.count:
            return self.count.wait_for(lambda: self.begun == self.ended, 30)

    def __exit__(self, *args: object) -> None:
        self.shutdown()
        self.thread.join()
        super().__exit__(*args)


class Hostile(unittest.IsolatedAsyncioTestCase):
    def test_answers_are_errors_of_the_package(self) -> None:
        for name, answer in ANSWERS.items():
            with self.subTest(name), Server(answer) as s:
                with drowse.Drowse(s.url, "t", retries=0, timeout=20) as c, self.assertRaises(drowse.DrowseError) as e:
                    c.create("x")
                self.assertNotIsInstance(e.exception, drowse.DeadlineExceeded)
                self.assertTrue(s.no_connections())

    async def test_answers_are_errors_of_the_package_for_asyncio(self) -> None:
        for name, answer in ANSWERS.items():
            with self.subTest(name), Server(answer) as s:
                async with drowse.AsyncDrowse(s.url, "t", retries=0, timeout=20) as c:
                    with self.assertRaises(drowse.DrowseError):
                        await c.create("x")

    def test_streams_are_errors_of_the_package(self) -> None:
        for name, answer in STREAMS.items():
            with self.subTest(name), Server(answer) as s:
                with drowse.Drowse(s.url, "t", retries=0, timeout=20) as c:
                    with self.assertRaises(drowse.DrowseError), c.sandbox("x").exec(["y"]) as p:
                        p.communicate()
                self.assertTrue(s.no_connections())

    async def test_streams_are_errors_of_the_package_for_asyncio(self) -> None:
        for name, answer in STREAMS.items():
            with self.subTest(name), Server(answer) as s:
                async with drowse.AsyncDrowse(s.url, "t", retries=0, timeout=20) as c:
                    with self.assertRaises(drowse.DrowseError):
                        async with await c.sandbox("x").exec(["y"]) as p:
                            await p.communicate()

    def test_output_beyond_the_window_is_refused_while_stdin_is_written(self) -> None:
        def flood() -> Iterator[bytes]:
            yield STARTED
            while True:
                yield frame(2, b"\x01" + bytes(32 << 10))

        with Server(flood) as s, drowse.Drowse(s.url, "t", retries=0) as c:
            with c.sandbox("x").exec(["y"], stdin=True) as p, self.assertRaises(drowse.ProtocolError):
                p.write(bytes(1 << 20))  # no ack comes, so that it must receive
            self.assertLess(sum(len(o.data) for o in p._waiting), 512 << 10)
            self.assertTrue(s.no_connections())

    def test_lines_that_never_end_are_refused(self) -> None:
        def endless() -> Iterator[bytes]:
            yield b"HTTP/1.1 200 OK\r\n\r\n"
            while True:
                yield b"x" * (1 << 20)

        with Server(endless) as s, drowse.Drowse(s.url, "t", retries=0) as c:
            with self.assertRaises(drowse.ProtocolError):
                next(iter(c.events()))
            self.assertTrue(s.no_connections())
