"""What the methods do. test_sync.py is made from test_async.py: see generate.py."""

from __future__ import annotations

import os
import pathlib
import tempfile
import unittest

import drowse
from drowse import AsyncDrowse

URL, TOKEN = os.environ.get("DROWSE_URL", ""), os.environ.get("DROWSE_TOKEN", "")
DENY = {"default": {"egress": "deny"}}


@unittest.skipUnless(URL, "there is no server: make test-sdk")
class Methods(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self) -> None:
        self.client = AsyncDrowse()

    async def asyncTearDown(self) -> None:
        async for b in self.client.list():
            await b.delete()
        await self.client.aclose()

    async def make(self, **more):
        return await self.client.create("test", **more)

    async def test_create_list_get_delete(self) -> None:
        a = await self.make(name="a", memory_mib=256, tags=["x"], class_="resumable", purpose="a test")
        self.assertEqual((a.info["memory_mib"], a.info["class"], a.info["tags"]), (256, "resumable", ["x"]))
        await self.make(name="b")
        c = await self.make()
        self.assertTrue(c.name)
        self.assertEqual({b.name async for b in self.client.list(page=1)}, {"a", "b", c.name})
        self.assertEqual([b.name async for b in self.client.list(tag="x", status=["running", "asleep"])], ["a"])
        self.assertEqual((await self.client.get("a")).info["purpose"], "a test")
        self.assertEqual((await self.make(name="a", get_or_create=True)).info["id"], a.info["id"])
        await a.delete()
        await a.delete()
        with self.assertRaises(drowse.NotFound) as e:
            await self.client.get("a")
        self.assertEqual((e.exception.status, e.exception.code), (404, "not-found"))
        self.assertTrue(e.exception.remedy)
        self.assertEqual((await self.client.version())["version"], "test")

    async def test_retried_creation_makes_one(self) -> None:
        async with AsyncDrowse(os.environ["TEST_FLAKY_URL"]) as flaky:
            a = await flaky.create("test")
            self.assertEqual(len(await a.fork(2)), 2)
            self.assertEqual(len([b async for b in self.client.list()]), 3)
        async with AsyncDrowse(os.environ["TEST_FLAKY_URL"], retries=0) as once:
            with self.assertRaises(drowse.ConnectionFailed):
                await once.create("test")
        await self.client.create("test", name="k", idempotency_key="mine")
        await self.client.create("test", name="k", idempotency_key="mine")
        with self.assertRaises(drowse.KeyReused):
            await self.client.create("test", name="other", idempotency_key="mine")

    async def test_errors(self) -> None:
        a = await self.make(name="a")
        for token, kind, status in (("wrong", drowse.Unauthorized, 401), (os.environ["TEST_READ_TOKEN"], drowse.Forbidden, 403), (os.environ["TEST_OTHER_TOKEN"], drowse.NotFound, 404)):
            async with AsyncDrowse(token=token) as other:
                with self.assertRaises(kind) as e:
                    await other.sandbox("a").run(["true"])
                self.assertEqual(e.exception.status, status)
                with self.assertRaises(kind):
                    await other.sandbox("a").exec(["true"])
        with self.assertRaises(drowse.Conflict) as e:
            await self.make(name="a")
        self.assertEqual(e.exception.code, "exists")
        with self.assertRaises(drowse.InvalidRequest) as e:
            await self.make(memory_mib=-1)
        self.assertEqual(e.exception.field, "spec.memory_mib")
        with self.assertRaises(drowse.InvalidRequest):
            await a.run([])
        with self.assertRaises(drowse.InvalidRequest) as e:
            await a.exec([])
        self.assertEqual((e.exception.code, e.exception.field), ("invalid", "command"))
        async with AsyncDrowse(token=os.environ["TEST_SLOW_TOKEN"], retries=0) as slow:
            with self.assertRaises(drowse.TooManyRequests) as e:
                for _ in range(10):
                    await slow.version()
            self.assertTrue(e.exception.retry_after)
        async with AsyncDrowse(token=os.environ["TEST_SLOW_TOKEN"]) as patient:
            await patient.version()
            await patient.version()
        async with AsyncDrowse("http://127.0.0.1:1", retries=0) as nobody:
            with self.assertRaises(drowse.ConnectionFailed):
                await nobody.version()
        with self.assertRaises(ValueError):
            AsyncDrowse("ftp://somewhere")

    async def test_run(self) -> None:
        a = await self.make()
        r = await a.run(["run"], stdin="some text")
        self.assertEqual((r.code, r.stdout, r.stderr, r.text), (3, b"some text", b"hello", "some text"))
        r = await a.run(["where"], user="dev", cwd="/srv", env={"A": "b"})
        self.assertEqual(r.text, "dev /srv A=b")
        with self.assertRaises(drowse.CommandFailed) as e:
            await a.run(["run"], check=True)
        self.assertEqual(e.exception.result.code, 3)
        self.assertEqual((await a.run(["sleep", "60"], timeout_seconds=1)).exit.timed_out, True)
        self.assertEqual((await a.run("exit 1")).code, 127)
        with self.assertRaises(drowse.DeadlineExceeded):
            await a.run(["sleep", "60"], timeout=0.2)
        self.assertEqual((await a.run(["true"])).code, 0)

    async def test_exec_streams(self) -> None:
        a = await self.make()
        async with await a.exec(["run"], stdin=True) as p:
            self.assertTrue(p.id and p.pid)
            await p.write("one ")
            await p.write(b"two")
            await p.close_stdin()
            got = {"stdout": b"", "stderr": b""}
            async for o in p:
                got[o.stream] += o.data
            self.assertEqual(got, {"stdout": b"one two", "stderr": b"hello"})
            self.assertEqual(p.exit.code, 3)
            self.assertEqual(p.offset, 12)
        big = os.urandom(3 << 20)
        async with await a.exec(["cat"], stdin=True) as p:
            done = await p.communicate(big)
            self.assertEqual((done.code, done.stdout == big), (0, True))
        async with await a.exec(["flood"]) as p:
            with self.assertRaises(drowse.DrowseError):
                await p.communicate(limit=1 << 20)
        async with await a.exec(["nothing"]) as p:
            self.assertEqual((await p.wait()).code, 127)
            self.assertTrue(p.exit.not_started)
        async with await a.exec(["true"], stdin=True) as p:
            await p.wait()
            with self.assertRaises(drowse.DrowseError):
                await p.write(b"x")

    async def test_slow_reader_stalls_the_command(self) -> None:
        a = await self.make()
        async with await a.exec(["flood"]) as p:
            await anext(p)
            for _ in range(20):  # others of this client are served meanwhile
                far = int(await a.files.read("/flooded")) if await a.files.exists("/flooded") else 0
            self.assertLess(far, 16)
            n = 0
            async for o in p:
                n += len(o.data)
            self.assertGreater(n, 31 << 20)
            self.assertEqual(p.exit.code, 0)

    async def test_leaving_the_block_kills_the_command(self) -> None:
        a = await self.make()
        async with await a.exec(["forever"]):
            while not await a.files.exists("/forever"):
                pass
        while await a.files.read("/forever") != b"killed":
            pass

    async def test_terminal_resize_signal(self) -> None:
        a = await self.make()
        async with await a.terminal(["terminal"], rows=24, cols=80) as p:
            text = b""
            while text != b"24x80 ":
                text += (await anext(p)).data
            await p.resize(50, 132)
            while text != b"24x80 50x132 ":
                text += (await anext(p)).data
            await p.signal(15)
            self.assertEqual((await p.wait()).signal, 15)

    async def test_detached_processes(self) -> None:
        a = await self.make()
        self.assertEqual(await a.processes.start(["echo1"], process="job"), "job")
        p = await a.processes.attach("job")
        await p.write("abc")
        got = b""
        while got != b"abc":
            got += (await anext(p)).data
        await p.detach()
        (one,) = await a.processes.list()
        self.assertEqual((one["process"], one["output_end"], one["detached"]), ("job", 3, True))
        async with await a.processes.attach("job", offset=2) as p:
            self.assertEqual((await anext(p)).data, b"c")
            await p.write("q")
            self.assertEqual((await p.wait()).code, 4)
        await a.processes.remove("job")
        p = await a.exec(["forever"], detach=True, process="other")
        await a.processes.signal("other", 9)
        self.assertEqual((await p.wait()).signal, 9)
        await p.aclose()
        with self.assertRaises(drowse.NotFound):
            await a.processes.attach("nothing")
        q = await a.exec(["forever"], detach=True, process="third")
        await a.delete()
        with self.assertRaises(drowse.DrowseError):
            await q.wait()
        await q.aclose()

    async def test_files(self) -> None:
        f = (await self.make()).files
        info = await f.write("/d/x", "hello world", mode="0640", parents=True)
        self.assertEqual((info["size"], info["mode"]), (11, "0640"))
        self.assertEqual(await f.read("/d/x"), b"hello world")
        self.assertEqual(b"".join([p async for p in f.stream("/d/x", offset=6, length=3)]), b"wor")
        self.assertEqual(b"".join([p async for p in f.stream("/d/x", length=0)]), b"")
        await f.write("/d/x", b"!", append=True)
        big = os.urandom(5 << 20)
        await f.write("/big", (big[i : i + 70001] for i in range(0, len(big), 70001)))
        self.assertEqual(b"".join([p async for p in f.stream("/big")]), big)
        with self.assertRaises(drowse.DrowseError):
            await f.read("/big", most=1 << 20)
        self.assertEqual([e["name"] for e in await f.list("/d")], ["x"])
        etag = (await f.stat("/d/x"))["etag"]
        with self.assertRaises(drowse.PreconditionFailed):
            await f.write("/d/x", b"", if_none_match="*")
        with self.assertRaises(drowse.PreconditionFailed):
            await f.write("/d/x", b"", if_match='"0-0"')
        await f.write("/d/x", b"new", if_match=etag)
        await f.mkdir("/e/f", parents=True)
        await f.move("/d/x", "/e/f/y")
        self.assertFalse(await f.exists("/d/x"))
        self.assertEqual((await f.stat("/e/f/y"))["kind"], "file")
        with self.assertRaises(drowse.DrowseError):
            await f.remove("/e")
        await f.remove("/e", recursive=True)
        with self.assertRaises(drowse.NotFound) as e:
            await f.read("/e/f/y")
        self.assertEqual(e.exception.code, "guest-not-found")

    async def test_trees(self) -> None:
        f = (await self.make()).files
        with tempfile.TemporaryDirectory() as dir:
            here = pathlib.Path(dir, "here")
            (here / "sub").mkdir(parents=True)
            (here / "a").write_bytes(b"a" * 1000)
            (here / "sub" / "b").write_bytes(os.urandom(1 << 20))
            os.link(here / "a", here / "sub" / "also")
            self.assertGreater(await f.upload(str(here), "/up"), 1 << 20)
            self.assertEqual(await f.read("/up/sub/also"), b"a" * 1000)
            await f.download("/up", str(pathlib.Path(dir, "back")))
            for name in ("a", "sub/b", "sub/also"):
                self.assertEqual(next(pathlib.Path(dir, "back").rglob(name)).read_bytes(), (here / name).read_bytes())
            tar = b"".join([p async for p in f.download_tree("/up")])
            await f.mkdir("/copy")
            self.assertGreater(await f.upload_tree("/copy", tar), 0)

    async def test_watch(self) -> None:
        f = (await self.make()).files
        await f.mkdir("/w")
        events = f.watch("/w")
        self.assertEqual((await anext(events))["event"], "ready")
        await f.write("/w/x", b"1")
        self.assertIn((await anext(events))["event"], ("created", "written"))
        await events.aclose()

    async def test_sleep_wake_and_the_server_wakes(self) -> None:
        a = await self.make(name="through")
        events = self.client.events(since=0, sandbox="through")
        await a.files.write("/kept", "1")
        self.assertTrue((await a.sleep())["snapshot"])
        self.assertEqual((await a.refresh())["status"], "asleep")
        self.assertEqual((await a.wake())["status"], "running")
        await a.sleep(hooks="skip")
        self.assertEqual(await a.files.read("/kept"), b"1")
        self.assertEqual((await a.refresh())["status"], "running")
        seen: list[str] = []
        async for e in events:  # one stream through two sleeps and wakes
            seen.append(e["type"])
            if sum("wake" in t or "woken" in t or "woke" in t for t in seen) >= 2 or len(seen) > 30:
                break
        self.assertLessEqual(len(seen), 30, seen)
        await events.aclose()
        await a.sleep()
        async with await a.exec(["cat"], stdin=True) as p:
            self.assertEqual((await p.communicate("woken")).stdout, b"woken")

    async def test_stop_start_update_extend_rename(self) -> None:
        a = await self.make(name="a")
        self.assertEqual((await a.stop())["status"], "stopped")
        self.assertEqual((await a.start())["status"], "running")
        self.assertEqual((await a.update(tags=["t"], class_="workspace"))["class"], "workspace")
        with self.assertRaises(drowse.PreconditionFailed):
            await a.update(tags=[], if_match='"0"')
        e = await self.make(class_="ephemeral", expires="2090-01-01T00:00:00Z")
        self.assertEqual((await e.extend("2091-01-01T00:00:00Z"))["expires"][:4], "2091")
        await a.sleep()
        await a.rename("z")
        self.assertEqual((await a.refresh())["name"], "z")
        self.assertEqual((await a.run(["true"])).code, 0)
        self.assertEqual((await a.stats())["name"], "z")

    async def test_fork_lineage_snapshot_rewind_clone(self) -> None:
        a = await self.make(name="a")
        await a.files.write("/x", "1")
        kids = await a.fork(names=["k1", "k2"], tags=["kid"])
        self.assertEqual([k.name for k in kids], ["k1", "k2"])
        (grand,) = await kids[0].fork()
        self.assertEqual(await grand.files.read("/x"), b"1")
        self.assertEqual((await grand.lineage()).ancestors, ["k1", "a"])
        self.assertEqual((await a.lineage()).children, ["k1", "k2"])
        shot = (await a.snapshot("before"))["snapshot"]
        await a.files.write("/x", "2")
        await a.sleep()
        await a.rewind(shot)
        self.assertEqual(await a.files.read("/x"), b"1")
        self.assertIn(shot, [s["id"] for s in await a.list_snapshots()])
        self.assertEqual((await self.client.snapshots.get(shot))["note"], "before")
        self.assertEqual((await self.client.snapshots.tag(shot, ["good"]))["tags"], ["good"])
        self.assertIn(shot, [s["id"] for s in await self.client.snapshots.list()])
        c = await self.client.snapshots.clone(shot, name="c", metadata={"purpose": "copy"})
        self.assertEqual((c.name, await c.files.read("/x")), ("c", b"1"))

    async def test_snapshots_are_exported_imported_and_removed(self) -> None:
        a = await self.make(name="a")
        shot = (await a.snapshot())["snapshot"]
        await a.delete()
        data = b"".join([p async for p in self.client.snapshots.export(shot)])
        await self.client.snapshots.remove(shot)
        with self.assertRaises(drowse.Conflict) as e:  # all of it is read, and then it is of another machine
            await self.client.snapshots.import_(data[i : i + 5000] for i in range(0, len(data), 5000))
        self.assertIn("another host", str(e.exception))
        with self.assertRaises(drowse.NotFound):
            await self.client.snapshots.get(shot)

    async def test_policy(self) -> None:
        a = await self.make(policy=DENY)
        was = await a.policy()
        self.assertEqual(was.value["default"]["egress"], "deny")
        await a.set_policy({"default": {"egress": "allow"}}, if_match=was.etag)
        self.assertEqual((await a.policy()).value["default"]["egress"], "allow")
        with self.assertRaises(drowse.PreconditionFailed) as e:
            await a.set_policy(DENY, if_match=was.etag)
        self.assertEqual(e.exception.status, 412)
        await a.set_policy(DENY)

    async def test_events_from_now(self) -> None:
        a = await self.make(name="a")
        types = [e["type"] async for e in self.client.events(follow=False, sandbox="a")]
        self.assertTrue(types)
        last = [e["cursor"] async for e in self.client.events(follow=False)][-1]
        await a.sleep()
        async for e in self.client.events(since=last, sandbox="a"):
            self.assertGreater(e["cursor"], last)
            break

    async def test_secrets(self) -> None:
        a = await self.make()
        await a.secrets.set("key", "value", mode=0o400)
        (one,) = await a.secrets.list()
        self.assertEqual((one["name"], one["size"]), ("key", 5))
        await a.secrets.remove("key")
        self.assertEqual(await a.secrets.list(), [])

    async def test_volumes(self) -> None:
        v = await self.client.volumes.create("data", 16)
        self.assertEqual(v["size_bytes"], 16 << 20)
        self.assertEqual((await self.client.volumes.resize("data", 32))["size_bytes"], 32 << 20)
        self.assertEqual((await self.client.volumes.get("data"))["name"], "data")
        self.assertEqual([v["name"] for v in await self.client.volumes.list()], ["data"])
        await self.client.volumes.remove("data")
        self.assertEqual(await self.client.volumes.list(), [])

    async def test_images_and_operations(self) -> None:
        images = self.client.images
        self.assertIn("test", str([i.get("tags") for i in await images.list()]))
        self.assertTrue((await images.get("test"))["id"])
        data = b"".join([p async for p in images.export("test", format="oci-archive")])
        copy = await images.import_(data, tag="copy", format="oci-archive")
        self.assertTrue(copy["id"])
        await images.remove("copy")
        with self.assertRaises(drowse.NotFound):
            await images.get("copy")
        op = await images.pull("docker://127.0.0.1:1/none:x")
        seen: list[str] = []
        end = await self.client.operations.wait(op["id"], lambda o: seen.append(o["state"]))
        self.assertEqual((end["state"], seen[-1]), ("failed", "failed"))
        self.assertTrue(end["error"]["code"])
        self.assertIn(op["id"], [o["id"] for o in await self.client.operations.list()])
        self.assertEqual((await self.client.operations.cancel(op["id"]))["state"], "failed")

    async def test_ports(self) -> None:
        a = await self.make(name="a")
        async with await a.connect(80) as c:
            await c.write(b"ping")
            self.assertEqual(await c.read(), b"PING")
            self.assertEqual(b"".join([p async for p in c]), b"")
            await c.close_write()
        with self.assertRaises(drowse.APIError):
            await a.connect(81)
        with self.assertRaises(ValueError):
            a.url(80)
        async with AsyncDrowse(gateway="boxes.example.org") as c:
            self.assertEqual(c.sandbox("a").url(8000), "https://8000-a.boxes.example.org")

    async def test_host_health_and_prune(self) -> None:
        await self.make(name="a", class_="resumable", owner="them", tags=["y"])
        made = self.client.events(follow=False, type="sandbox.created", owner="them", tag="y")
        self.assertEqual({e["sandbox"] async for e in made}, {"a"})
        self.assertTrue((await self.client.health())["ok"])
        self.assertTrue((await self.client.ready())["ok"])
        self.assertEqual((await self.client.host())["sandboxes"], {"running": 1})
        self.assertEqual(await self.client.secret_sources(), [{"name": "ours", "kind": "file", "owners": ["us"]}])
        old = await self.make(name="old", class_="ephemeral", owner="us", tags=["x"])
        self.assertEqual([b.name async for b in self.client.list(owner="us", class_="ephemeral")], ["old"])
        await old.update(expires="2020-01-01T00:00:00Z")
        due = await self.client.prune(dry_run=True)
        self.assertEqual([one["name"] for one in due["remove"]], ["old"])
        self.assertEqual([b.name async for b in self.client.list()], ["a", "old"])
        await self.client.prune()
        self.assertEqual([b.name async for b in self.client.list()], ["a"])

    async def test_templates(self) -> None:
        templates = self.client.templates
        op = await self.client.operations.wait((await templates.create("test", memory_mib=128))["id"])
        self.assertEqual(op["state"], "done", op)
        made = await templates.get(op["template"])
        self.assertEqual((made["state"], made["memory_mib"]), ("ready", 128))
        self.assertEqual([t["key"] for t in await templates.list() if t["state"] == "ready"], [made["key"]])
        self.assertEqual((await (await self.make(name="a", memory_mib=128)).inspect())["template"], made["snapshot"])
        self.assertNotIn("template", await (await self.make(name="b", memory_mib=128, boot=True)).inspect())
        await templates.remove(made["key"])
        self.assertEqual([t["key"] for t in await templates.list() if t["state"] == "ready"], [])

    async def test_services(self) -> None:
        a = await self.make()
        s = a.services
        self.assertEqual((await s.set("main", ["run", "-"]))["name"], "main")
        self.assertEqual((await s.wait("main", timeout_seconds=30))["ready"], True)
        self.assertEqual((await s.stop("main"))["state"], "stopped")
        self.assertEqual((await s.start("main"))["state"], "running")
        self.assertEqual((await s.restart("main"))["state"], "running")
        self.assertEqual([one["argv"] for one in await s.list()], [["run", "-"]])
        self.assertEqual(b"".join([piece async for piece in s.log("main")]), b"run -\n" * 3)
        log, follows = b"", s.log("main", follow=True)
        while log != b"run -\n" * 3:
            log += await anext(follows)
        await s.restart("main")
        self.assertEqual(await anext(follows), b"run -\n")
        await follows.aclose()
        await s.remove("main")
        self.assertEqual(await s.list(), [])

    async def test_network(self) -> None:
        a = await self.make(policy=DENY)
        self.assertEqual((await a.network())["name"], a.name)
        self.assertEqual([e async for e in a.network_events()], [])
        self.assertEqual([f["peer"] for f in (await a.flows())["flows"]], ["192.0.2.1"])
        follows = a.follow_flows()
        self.assertEqual((await anext(follows))["peer"], "192.0.2.1")
        await follows.aclose()
        gateway = await a.gateway()
        await a.update(gateway={"public_ports": [80]}, new_gateway_token=True)
        now = await a.gateway()
        self.assertEqual(now["public_ports"], [80])
        self.assertNotEqual(now["token"], gateway["token"])

    async def test_what_is_known_of_a_sandbox(self) -> None:
        a = await self.make(name="a")
        await a.run(["true"])
        await a.run(["run"])
        await a.sleep()
        h = await a.history(limit=1, before="2090-01-01T00:00:00Z")
        self.assertEqual(([r["command"] for r in h["runs"]], len(h["sleeps"])), ([["run"]], 1))
        self.assertEqual((await a.inspect())["spec"]["name"], "a")
        await a.wake()
        said = [line async for line in a.audit(since="2020-01-01T00:00:00Z", trailer=True)]
        self.assertEqual([e["argv"] for e in said if e.get("argv")], [["true"], ["run"]], said)
        self.assertIn("trailer", said[-1])
        async for line in a.audit(follow=True):
            self.assertTrue(line["kind"])
            break
        self.assertTrue([line async for line in a.diff(limit=10)][-1]["end"])
        self.assertEqual(b"".join([piece async for piece in a.console(tail=100)]), b"")
        self.assertEqual(await self.after_stop(a), b"")

    async def after_stop(self, a) -> bytes:
        console = a.console(follow=True)
        await a.stop()
        return b"".join([piece async for piece in console])

    async def test_promote(self) -> None:
        a = await self.make()
        with self.assertRaises(drowse.InvalidRequest) as e:  # over TCP nobody may say to which directory of the host
            await a.promote()
        self.assertIn("is to be promoted", str(e.exception))

    async def test_migrate(self) -> None:
        a = await self.make()
        with self.assertRaises(drowse.InvalidRequest) as e:
            await a.migrate("elsewhere", hooks="skip")
        self.assertIn("in no cluster", str(e.exception))

    async def test_parameters(self) -> None:
        a = await self.make(name="a")
        f = a.files
        await f.write("/n", "1", uid=7, gid=8, if_none_match="*")
        self.assertEqual((await f.stat("/n", link=True))["kind"], "file")
        await f.mkdir("/t", mode="0700")
        await f.upload_tree("/t", b"".join([p async for p in f.download_tree("/n")]), uid=7, gid=8)
        events = f.watch("/t", recursive=True, keep_awake=True)
        self.assertEqual((await anext(events))["event"], "ready")
        await events.aclose()
        row = await self.client.call("GET", "/v1/sandboxes/a", etag=True)
        self.assertEqual((await a.update(purpose="p", if_match=row.etag))["purpose"], "p")
        await a.secrets.set("key", "v", uid=7, gid=8, transient=True)
        await a.secrets.set("of", source="ours", proxy=True)
        self.assertEqual([(s["name"], s.get("from")) for s in await a.secrets.list()], [("key", None), ("of", "ours")])
        job = await a.processes.start(["terminal"], tty=(24, 80), user="u", cwd="/", env={"A": "b"}, timeout_seconds=60, output_kib=64)
        async with await a.processes.attach(job) as p:
            self.assertEqual((await anext(p)).data, b"24x80 ")
        async with await a.exec(["flood"], detach=True, output_kib=64, hold_output=True) as p:
            self.assertEqual(sum([len(o.data) async for o in p]), 32 << 20)  # nothing was lost
        await a.processes.start(["true"], no_stdin=True, hold_output=True)
        tap = await self.make(policy=DENY)
        whole = (await tap.snapshot(hooks="skip"))["snapshot"]
        c = await self.client.snapshots.clone(whole, policy={"default": {"egress": "allow"}}, idle={"sleep_seconds": 3600}, metadata={"purpose": "copy"})
        self.assertEqual(((await c.policy()).value["default"]["egress"], c.info["purpose"]), ("allow", "copy"))
        shot = (await a.snapshot(disk_only=True))["snapshot"]
        await a.sleep()
        b = await self.make(name="b", disk=shot)
        self.assertEqual(await b.files.read("/n"), b"1")
        op = await self.client.images.pull("debian:bookworm", include=["git"], tag="x", platform="linux/amd64", no_cache=True)
        await self.client.operations.cancel(op["id"])
        await b.stop(kill=True)


if __name__ == "__main__":
    unittest.main()
