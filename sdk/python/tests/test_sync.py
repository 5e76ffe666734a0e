# Made from test_async.py by generate.py.
"""What the methods do. test_sync.py is made from test_async.py: see generate.py."""

from __future__ import annotations

import os
import pathlib
import tempfile
import unittest

import drowse
from drowse import Drowse

URL, TOKEN = os.environ.get("DROWSE_URL", ""), os.environ.get("DROWSE_TOKEN", "")
DENY = {"default": {"egress": "deny"}}


@unittest.skipUnless(URL, "there is no server: make test-sdk")
class Methods(unittest.TestCase):
    def setUp(self) -> None:
        self.client = Drowse()

    def tearDown(self) -> None:
        for b in self.client.list():
            b.delete()
        self.client.close()

    def make(self, **more):
        return self.client.create("test", **more)

    def test_create_list_get_delete(self) -> None:
        a = self.make(name="a", memory_mib=256, tags=["x"], class_="resumable", purpose="a test")
        self.assertEqual((a.info["memory_mib"], a.info["class"], a.info["tags"]), (256, "resumable", ["x"]))
        self.make(name="b")
        c = self.make()
        self.assertTrue(c.name)
        self.assertEqual({b.name for b in self.client.list(page=1)}, {"a", "b", c.name})
        self.assertEqual([b.name for b in self.client.list(tag="x", status=["running", "asleep"])], ["a"])
        self.assertEqual((self.client.get("a")).info["purpose"], "a test")
        self.assertEqual((self.make(name="a", get_or_create=True)).info["id"], a.info["id"])
        a.delete()
        a.delete()
        with self.assertRaises(drowse.NotFound) as e:
            self.client.get("a")
        self.assertEqual((e.exception.status, e.exception.code), (404, "not-found"))
        self.assertTrue(e.exception.remedy)
        self.assertEqual((self.client.version())["version"], "test")

    def test_retried_creation_makes_one(self) -> None:
        with Drowse(os.environ["TEST_FLAKY_URL"]) as flaky:
            a = flaky.create("test")
            self.assertEqual(len(a.fork(2)), 2)
            self.assertEqual(len([b for b in self.client.list()]), 3)
        with Drowse(os.environ["TEST_FLAKY_URL"], retries=0) as once:
            with self.assertRaises(drowse.ConnectionFailed):
                once.create("test")
        self.client.create("test", name="k", idempotency_key="mine")
        self.client.create("test", name="k", idempotency_key="mine")
        with self.assertRaises(drowse.KeyReused):
            self.client.create("test", name="other", idempotency_key="mine")

    def test_errors(self) -> None:
        a = self.make(name="a")
        for token, kind, status in (("wrong", drowse.Unauthorized, 401), (os.environ["TEST_READ_TOKEN"], drowse.Forbidden, 403), (os.environ["TEST_OTHER_TOKEN"], drowse.NotFound, 404)):
            with Drowse(token=token) as other:
                with self.assertRaises(kind) as e:
                    other.sandbox("a").run(["true"])
                self.assertEqual(e.exception.status, status)
                with self.assertRaises(kind):
                    other.sandbox("a").exec(["true"])
        with self.assertRaises(drowse.Conflict) as e:
            self.make(name="a")
        self.assertEqual(e.exception.code, "exists")
        with self.assertRaises(drowse.InvalidRequest):
            self.make(memory_mib=-1)
        with self.assertRaises(drowse.InvalidRequest):
            a.run([])
        with self.assertRaises(drowse.InvalidRequest) as e:
            a.exec([])
        self.assertEqual(e.exception.code, "invalid")
        with Drowse(token=os.environ["TEST_SLOW_TOKEN"], retries=0) as slow:
            with self.assertRaises(drowse.TooManyRequests) as e:
                for _ in range(10):
                    slow.version()
            self.assertTrue(e.exception.retry_after)
        with Drowse(token=os.environ["TEST_SLOW_TOKEN"]) as patient:
            patient.version()
            patient.version()
        with Drowse("http://127.0.0.1:1", retries=0) as nobody:
            with self.assertRaises(drowse.ConnectionFailed):
                nobody.version()
        with self.assertRaises(ValueError):
            Drowse("ftp://somewhere")

    def test_run(self) -> None:
        a = self.make()
        r = a.run(["run"], stdin="some text")
        self.assertEqual((r.code, r.stdout, r.stderr, r.text), (3, b"some text", b"hello", "some text"))
        r = a.run(["where"], user="dev", cwd="/srv", env={"A": "b"})
        self.assertEqual(r.text, "dev /srv A=b")
        with self.assertRaises(drowse.CommandFailed) as e:
            a.run(["run"], check=True)
        self.assertEqual(e.exception.result.code, 3)
        self.assertEqual((a.run(["sleep", "60"], timeout_seconds=1)).exit.timed_out, True)
        self.assertEqual((a.run("exit 1")).code, 127)
        with self.assertRaises(drowse.DeadlineExceeded):
            a.run(["sleep", "60"], timeout=0.2)
        self.assertEqual((a.run(["true"])).code, 0)

    def test_exec_streams(self) -> None:
        a = self.make()
        with a.exec(["run"], stdin=True) as p:
            self.assertTrue(p.id and p.pid)
            p.write("one ")
            p.write(b"two")
            p.close_stdin()
            got = {"stdout": b"", "stderr": b""}
            for o in p:
                got[o.stream] += o.data
            self.assertEqual(got, {"stdout": b"one two", "stderr": b"hello"})
            self.assertEqual(p.exit.code, 3)
            self.assertEqual(p.offset, 12)
        big = os.urandom(3 << 20)
        with a.exec(["cat"], stdin=True) as p:
            done = p.communicate(big)
            self.assertEqual((done.code, done.stdout == big), (0, True))
        with a.exec(["flood"]) as p:
            with self.assertRaises(drowse.DrowseError):
                p.communicate(limit=1 << 20)
        with a.exec(["nothing"]) as p:
            self.assertEqual((p.wait()).code, 127)
            self.assertTrue(p.exit.not_started)
        with a.exec(["true"], stdin=True) as p:
            p.wait()
            with self.assertRaises(drowse.DrowseError):
                p.write(b"x")

    def test_slow_reader_stalls_the_command(self) -> None:
        a = self.make()
        with a.exec(["flood"]) as p:
            next(p)
            for _ in range(20):  # others of this client are served meanwhile
                far = int(a.files.read("/flooded")) if a.files.exists("/flooded") else 0
            self.assertLess(far, 16)
            n = 0
            for o in p:
                n += len(o.data)
            self.assertGreater(n, 31 << 20)
            self.assertEqual(p.exit.code, 0)

    def test_leaving_the_block_kills_the_command(self) -> None:
        a = self.make()
        with a.exec(["forever"]):
            while not a.files.exists("/forever"):
                pass
        while a.files.read("/forever") != b"killed":
            pass

    def test_terminal_resize_signal(self) -> None:
        a = self.make()
        with a.terminal(["terminal"], rows=24, cols=80) as p:
            text = b""
            while text != b"24x80 ":
                text += (next(p)).data
            p.resize(50, 132)
            while text != b"24x80 50x132 ":
                text += (next(p)).data
            p.signal(15)
            self.assertEqual((p.wait()).signal, 15)

    def test_detached_processes(self) -> None:
        a = self.make()
        self.assertEqual(a.processes.start(["echo1"], process="job"), "job")
        p = a.processes.attach("job")
        p.write("abc")
        got = b""
        while got != b"abc":
            got += (next(p)).data
        p.detach()
        (one,) = a.processes.list()
        self.assertEqual((one["process"], one["output_end"], one["detached"]), ("job", 3, True))
        with a.processes.attach("job", offset=2) as p:
            self.assertEqual((next(p)).data, b"c")
            p.write("q")
            self.assertEqual((p.wait()).code, 4)
        a.processes.remove("job")
        p = a.exec(["forever"], detach=True, process="other")
        a.processes.signal("other", 9)
        self.assertEqual((p.wait()).signal, 9)
        p.close()
        with self.assertRaises(drowse.NotFound):
            a.processes.attach("nothing")
        q = a.exec(["forever"], detach=True, process="third")
        a.delete()
        with self.assertRaises(drowse.DrowseError):
            q.wait()
        q.close()

    def test_files(self) -> None:
        f = (self.make()).files
        info = f.write("/d/x", "hello world", mode="0640", parents=True)
        self.assertEqual((info["size"], info["mode"]), (11, "0640"))
        self.assertEqual(f.read("/d/x"), b"hello world")
        self.assertEqual(b"".join([p for p in f.stream("/d/x", offset=6, length=3)]), b"wor")
        self.assertEqual(b"".join([p for p in f.stream("/d/x", length=0)]), b"")
        f.write("/d/x", b"!", append=True)
        big = os.urandom(5 << 20)
        f.write("/big", (big[i : i + 70001] for i in range(0, len(big), 70001)))
        self.assertEqual(b"".join([p for p in f.stream("/big")]), big)
        with self.assertRaises(drowse.DrowseError):
            f.read("/big", most=1 << 20)
        self.assertEqual([e["name"] for e in f.list("/d")], ["x"])
        etag = (f.stat("/d/x"))["etag"]
        with self.assertRaises(drowse.PreconditionFailed):
            f.write("/d/x", b"", if_none_match="*")
        with self.assertRaises(drowse.PreconditionFailed):
            f.write("/d/x", b"", if_match='"0-0"')
        f.write("/d/x", b"new", if_match=etag)
        f.mkdir("/e/f", parents=True)
        f.move("/d/x", "/e/f/y")
        self.assertFalse(f.exists("/d/x"))
        self.assertEqual((f.stat("/e/f/y"))["kind"], "file")
        with self.assertRaises(drowse.DrowseError):
            f.remove("/e")
        f.remove("/e", recursive=True)
        with self.assertRaises(drowse.NotFound) as e:
            f.read("/e/f/y")
        self.assertEqual(e.exception.code, "guest-not-found")

    def test_trees(self) -> None:
        f = (self.make()).files
        with tempfile.TemporaryDirectory() as dir:
            here = pathlib.Path(dir, "here")
            (here / "sub").mkdir(parents=True)
            (here / "a").write_bytes(b"a" * 1000)
            (here / "sub" / "b").write_bytes(os.urandom(1 << 20))
            os.link(here / "a", here / "sub" / "also")
            self.assertGreater(f.upload(str(here), "/up"), 1 << 20)
            self.assertEqual(f.read("/up/sub/also"), b"a" * 1000)
            f.download("/up", str(pathlib.Path(dir, "back")))
            for name in ("a", "sub/b", "sub/also"):
                self.assertEqual(next(pathlib.Path(dir, "back").rglob(name)).read_bytes(), (here / name).read_bytes())
            tar = b"".join([p for p in f.download_tree("/up")])
            f.mkdir("/copy")
            self.assertGreater(f.upload_tree("/copy", tar), 0)

    def test_watch(self) -> None:
        f = (self.make()).files
        f.mkdir("/w")
        events = f.watch("/w")
        self.assertEqual((next(events))["event"], "ready")
        f.write("/w/x", b"1")
        self.assertIn((next(events))["event"], ("created", "written"))
        events.close()

    def test_sleep_wake_and_the_server_wakes(self) -> None:
        a = self.make(name="a")
        events = self.client.events(since=0, sandbox="a")
        a.files.write("/kept", "1")
        self.assertTrue((a.sleep())["snapshot"])
        self.assertEqual((a.refresh())["status"], "asleep")
        self.assertEqual((a.wake())["status"], "running")
        a.sleep(hooks="skip")
        self.assertEqual(a.files.read("/kept"), b"1")
        self.assertEqual((a.refresh())["status"], "running")
        seen: list[str] = []
        for e in events:  # one stream through two sleeps and wakes
            seen.append(e["type"])
            if sum("wake" in t or "woken" in t or "woke" in t for t in seen) >= 2 or len(seen) > 30:
                break
        self.assertLessEqual(len(seen), 30, seen)
        events.close()
        a.sleep()
        with a.exec(["cat"], stdin=True) as p:
            self.assertEqual((p.communicate("woken")).stdout, b"woken")

    def test_stop_start_update_extend_rename(self) -> None:
        a = self.make(name="a")
        self.assertEqual((a.stop())["status"], "stopped")
        self.assertEqual((a.start())["status"], "running")
        self.assertEqual((a.update(tags=["t"], class_="workspace"))["class"], "workspace")
        with self.assertRaises(drowse.PreconditionFailed):
            a.update(tags=[], if_match='"0"')
        e = self.make(class_="ephemeral", expires="2090-01-01T00:00:00Z")
        self.assertEqual((e.extend("2091-01-01T00:00:00Z"))["expires"][:4], "2091")
        a.sleep()
        a.rename("z")
        self.assertEqual((a.refresh())["name"], "z")
        self.assertEqual((a.run(["true"])).code, 0)
        self.assertEqual((a.stats())["name"], "z")

    def test_fork_lineage_snapshot_rewind_clone(self) -> None:
        a = self.make(name="a")
        a.files.write("/x", "1")
        kids = a.fork(names=["k1", "k2"], tags=["kid"])
        self.assertEqual([k.name for k in kids], ["k1", "k2"])
        (grand,) = kids[0].fork()
        self.assertEqual(grand.files.read("/x"), b"1")
        self.assertEqual((grand.lineage()).ancestors, ["k1", "a"])
        self.assertEqual((a.lineage()).children, ["k1", "k2"])
        shot = (a.snapshot("before"))["snapshot"]
        a.files.write("/x", "2")
        a.sleep()
        a.rewind(shot)
        self.assertEqual(a.files.read("/x"), b"1")
        self.assertIn(shot, [s["id"] for s in a.list_snapshots()])
        self.assertEqual((self.client.snapshots.get(shot))["note"], "before")
        self.assertEqual((self.client.snapshots.tag(shot, ["good"]))["tags"], ["good"])
        self.assertIn(shot, [s["id"] for s in self.client.snapshots.list()])
        c = self.client.snapshots.clone(shot, name="c", metadata={"purpose": "copy"})
        self.assertEqual((c.name, c.files.read("/x")), ("c", b"1"))

    def test_snapshots_are_exported_imported_and_removed(self) -> None:
        a = self.make(name="a")
        shot = (a.snapshot())["snapshot"]
        a.delete()
        data = b"".join([p for p in self.client.snapshots.export(shot)])
        self.client.snapshots.remove(shot)
        with self.assertRaises(drowse.Conflict) as e:  # all of it is read, and then it is of another machine
            self.client.snapshots.import_(data[i : i + 5000] for i in range(0, len(data), 5000))
        self.assertIn("another host", str(e.exception))
        with self.assertRaises(drowse.NotFound):
            self.client.snapshots.get(shot)

    def test_policy(self) -> None:
        a = self.make(policy=DENY)
        was = a.policy()
        self.assertEqual(was.value["default"]["egress"], "deny")
        a.set_policy({"default": {"egress": "allow"}}, if_match=was.etag)
        self.assertEqual((a.policy()).value["default"]["egress"], "allow")
        with self.assertRaises(drowse.PreconditionFailed) as e:
            a.set_policy(DENY, if_match=was.etag)
        self.assertEqual(e.exception.status, 412)
        a.set_policy(DENY)

    def test_events_from_now(self) -> None:
        a = self.make(name="a")
        types = [e["type"] for e in self.client.events(follow=False, sandbox="a")]
        self.assertTrue(types)
        last = [e["cursor"] for e in self.client.events(follow=False)][-1]
        a.sleep()
        for e in self.client.events(since=last, sandbox="a"):
            self.assertGreater(e["cursor"], last)
            break

    def test_secrets(self) -> None:
        a = self.make()
        a.secrets.set("key", "value", mode=0o400)
        (one,) = a.secrets.list()
        self.assertEqual((one["name"], one["size"]), ("key", 5))
        a.secrets.remove("key")
        self.assertEqual(a.secrets.list(), [])

    def test_volumes(self) -> None:
        v = self.client.volumes.create("data", 16)
        self.assertEqual(v["size_bytes"], 16 << 20)
        self.assertEqual((self.client.volumes.resize("data", 32))["size_bytes"], 32 << 20)
        self.assertEqual((self.client.volumes.get("data"))["name"], "data")
        self.assertEqual([v["name"] for v in self.client.volumes.list()], ["data"])
        self.client.volumes.remove("data")
        self.assertEqual(self.client.volumes.list(), [])

    def test_images_and_operations(self) -> None:
        images = self.client.images
        self.assertIn("test", str([i.get("tags") for i in images.list()]))
        self.assertTrue((images.get("test"))["id"])
        data = b"".join([p for p in images.export("test", format="oci-archive")])
        copy = images.import_(data, tag="copy", format="oci-archive")
        self.assertTrue(copy["id"])
        images.remove("copy")
        with self.assertRaises(drowse.NotFound):
            images.get("copy")
        op = images.pull("docker://127.0.0.1:1/none:x")
        seen: list[str] = []
        end = self.client.operations.wait(op["id"], lambda o: seen.append(o["state"]))
        self.assertEqual((end["state"], seen[-1]), ("failed", "failed"))
        self.assertTrue(end["error"]["code"])
        self.assertIn(op["id"], [o["id"] for o in self.client.operations.list()])
        self.assertEqual((self.client.operations.cancel(op["id"]))["state"], "failed")

    def test_ports(self) -> None:
        a = self.make(name="a")
        with a.connect(80) as c:
            c.write(b"ping")
            self.assertEqual(c.read(), b"PING")
            self.assertEqual(b"".join([p for p in c]), b"")
            c.close_write()
        with self.assertRaises(drowse.APIError):
            a.connect(81)
        with self.assertRaises(ValueError):
            a.url(80)
        with Drowse(gateway="boxes.example.org") as c:
            self.assertEqual(c.sandbox("a").url(8000), "https://8000-a.boxes.example.org")


if __name__ == "__main__":
    unittest.main()
