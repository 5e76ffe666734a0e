"""Cancellation, and use by several tasks and threads."""

from __future__ import annotations

import asyncio
import os
import threading
import unittest

import drowse

URL = os.environ.get("DROWSE_URL", "")


@unittest.skipUnless(URL, "there is no server: make test-sdk")
class Tasks(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self) -> None:
        self.client = drowse.AsyncDrowse()
        self.box = await self.client.create("test")

    async def asyncTearDown(self) -> None:
        await self.box.delete()
        await self.client.aclose()

    async def test_canceled_call_ends_and_the_client_goes_on(self) -> None:
        task = asyncio.create_task(self.box.run(["forever"]))
        while not await self.box.files.exists("/forever"):
            pass
        task.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await task
        while await self.box.files.read("/forever") != b"killed":
            pass

    async def test_canceled_read_of_a_stream_loses_nothing(self) -> None:
        async with await self.box.exec(["echo1"], stdin=True) as p:
            got = b""
            for letter in "abcdef":
                with self.assertRaises(TimeoutError):
                    async with asyncio.timeout(0.01):
                        await anext(p)
                await p.write(letter)
                got += (await anext(p)).data
            self.assertEqual(got, b"abcdef")

    async def test_one_task_writes_and_another_reads(self) -> None:
        data = os.urandom(4 << 20)
        async with await self.box.exec(["cat"], stdin=True) as p:

            async def feed() -> None:
                await p.write(data)
                await p.close_stdin()

            async with asyncio.TaskGroup() as group:
                group.create_task(feed())
                got = b"".join([o.data async for o in p])
            self.assertTrue(got == data)

    async def test_many_streams_at_once(self) -> None:
        async def one(i: int) -> bytes:
            async with await self.box.exec(["echo", str(i)]) as p:
                return (await p.communicate()).stdout

        got = await asyncio.gather(*(one(i) for i in range(50)))
        self.assertEqual(got, [b"%d\n" % i for i in range(50)])

    async def test_canceled_download_closes_its_connection(self) -> None:
        await self.box.files.write("/big", bytes(8 << 20))

        async def slow() -> None:
            async for _ in self.box.files.stream("/big"):
                await asyncio.sleep(60)

        task = asyncio.create_task(slow())
        await asyncio.sleep(0.1)
        task.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await task
        self.assertEqual(len(await self.box.files.read("/big")), 8 << 20)


@unittest.skipUnless(URL, "there is no server: make test-sdk")
class Threads(unittest.TestCase):
    def setUp(self) -> None:
        self.client = drowse.Drowse()
        self.box = self.client.create("test")

    def tearDown(self) -> None:
        self.box.delete()
        self.client.close()

    def test_threads_share_a_client(self) -> None:
        got: list[str] = []
        all = [threading.Thread(target=lambda i=i: got.append(self.box.run(["echo", str(i)]).text)) for i in range(20)]
        for t in all:
            t.start()
        for t in all:
            t.join()
        self.assertEqual(sorted(got), sorted(f"{i}\n" for i in range(20)))

    def test_one_thread_writes_and_another_reads(self) -> None:
        data = os.urandom(4 << 20)
        with self.box.exec(["cat"], stdin=True) as p:

            def feed() -> None:
                p.write(data)
                p.close_stdin()

            t = threading.Thread(target=feed)
            t.start()
            got = b"".join(o.data for o in p)
            t.join()
            self.assertTrue(got == data)

    def test_close_in_another_thread_ends_a_read(self) -> None:
        p = self.box.exec(["forever"])
        threading.Timer(0.1, p.close).start()
        with self.assertRaises(drowse.StreamLost):
            p.wait()


class NoServer(unittest.TestCase):
    def test_header_with_a_line_is_refused(self) -> None:
        with self.assertRaises(ValueError):
            drowse.Drowse("http://127.0.0.1:1", "a\r\nX: y").version()

    def test_both_classes_have_the_same_methods(self) -> None:
        for one, other in ((drowse.AsyncDrowse, drowse.Drowse), (drowse.AsyncSandbox, drowse.Sandbox), (drowse.AsyncProcess, drowse.Process), (drowse.AsyncPort, drowse.Port)):
            names = {n.replace("aclose", "close") for n in dir(one) if not n.startswith("_")}
            self.assertEqual(names, {n for n in dir(other) if not n.startswith("_")})
