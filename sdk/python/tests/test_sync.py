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
        with self.assertRaises(drowse.InvalidRequest) as e:
            self.make(memory_mib=-1)
        self.assertEqual(e.exception.field, "spec.memory_mib")
        with self.assertRaises(drowse.InvalidRequest):
            a.run([])
        with self.assertRaises(drowse.InvalidRequest) as e:
            a.exec([])
        self.assertEqual((e.exception.code, e.exception.field), ("invalid", "command"))
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
        a = self.make(name="through")
        events = self.client.events(since=0, sandbox="through")
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

    def test_host_health_and_prune(self) -> None:
        self.make(name="a", class_="resumable", owner="them", tags=["y"])
        made = self.client.events(follow=False, type="sandbox.created", owner="them", tag="y")
        self.assertEqual({e["sandbox"] for e in made}, {"a"})
        self.assertTrue((self.client.health())["ok"])
        self.assertTrue((self.client.ready())["ok"])
        self.assertEqual((self.client.host())["sandboxes"], {"running": 1})
        self.assertEqual(self.client.secret_sources(), [{"name": "ours", "kind": "file", "owners": ["us"]}])
        old = self.make(name="old", class_="ephemeral", owner="us", tags=["x"])
        self.assertEqual([b.name for b in self.client.list(owner="us", class_="ephemeral")], ["old"])
        old.update(expires="2020-01-01T00:00:00Z")
        due = self.client.prune(dry_run=True)
        self.assertEqual([one["name"] for one in due["remove"]], ["old"])
        self.assertEqual([b.name for b in self.client.list()], ["a", "old"])
        self.client.prune()
        self.assertEqual([b.name for b in self.client.list()], ["a"])

    def test_templates(self) -> None:
        templates = self.client.templates
        op = self.client.operations.wait((templates.create("test", memory_mib=128))["id"])
        self.assertEqual(op["state"], "done", op)
        made = templates.get(op["template"])
        self.assertEqual((made["state"], made["memory_mib"]), ("ready", 128))
        self.assertEqual([t["key"] for t in templates.list() if t["state"] == "ready"], [made["key"]])
        self.assertEqual(((self.make(name="a", memory_mib=128)).inspect())["template"], made["snapshot"])
        self.assertNotIn("template", (self.make(name="b", memory_mib=128, boot=True)).inspect())
        templates.remove(made["key"])
        self.assertEqual([t["key"] for t in templates.list() if t["state"] == "ready"], [])

    def test_services(self) -> None:
        a = self.make()
        s = a.services
        self.assertEqual((s.set("main", ["run", "-"]))["name"], "main")
        self.assertEqual((s.wait("main", timeout_seconds=30))["ready"], True)
        self.assertEqual((s.stop("main"))["state"], "stopped")
        self.assertEqual((s.start("main"))["state"], "running")
        self.assertEqual((s.restart("main"))["state"], "running")
        self.assertEqual([one["argv"] for one in s.list()], [["run", "-"]])
        self.assertEqual(b"".join([piece for piece in s.log("main")]), b"run -\n" * 3)
        log, follows = b"", s.log("main", follow=True)
        while log != b"run -\n" * 3:
            log += next(follows)
        s.restart("main")
        self.assertEqual(next(follows), b"run -\n")
        follows.close()
        s.remove("main")
        self.assertEqual(s.list(), [])

    def test_network(self) -> None:
        a = self.make(policy=DENY)
        self.assertEqual((a.network())["name"], a.name)
        self.assertEqual([e for e in a.network_events()], [])
        self.assertEqual([f["peer"] for f in (a.flows())["flows"]], ["192.0.2.1"])
        follows = a.follow_flows()
        self.assertEqual((next(follows))["peer"], "192.0.2.1")
        follows.close()
        gateway = a.gateway()
        a.update(gateway={"public_ports": [80]}, new_gateway_token=True)
        now = a.gateway()
        self.assertEqual(now["public_ports"], [80])
        self.assertNotEqual(now["token"], gateway["token"])

    def test_what_is_known_of_a_sandbox(self) -> None:
        a = self.make(name="a")
        a.run(["true"])
        a.run(["run"])
        a.sleep()
        h = a.history(limit=1, before="2090-01-01T00:00:00Z")
        self.assertEqual(([r["command"] for r in h["runs"]], len(h["sleeps"])), ([["run"]], 1))
        self.assertEqual((a.inspect())["spec"]["name"], "a")
        a.wake()
        said = [line for line in a.audit(since="2020-01-01T00:00:00Z", trailer=True)]
        self.assertEqual([e["argv"] for e in said if e.get("argv")], [["true"], ["run"]], said)
        self.assertIn("trailer", said[-1])
        for line in a.audit(follow=True):
            self.assertTrue(line["kind"])
            break
        self.assertTrue([line for line in a.diff(limit=10)][-1]["end"])
        self.assertEqual(b"".join([piece for piece in a.console(tail=100)]), b"")
        self.assertEqual(self.after_stop(a), b"")

    def after_stop(self, a) -> bytes:
        console = a.console(follow=True)
        a.stop()
        return b"".join([piece for piece in console])

    def test_promote(self) -> None:
        a = self.make()
        with self.assertRaises(drowse.InvalidRequest) as e:  # over TCP nobody may say to which directory of the host
            a.promote()
        self.assertIn("is to be promoted", str(e.exception))

    def test_migrate(self) -> None:
        a = self.make()
        with self.assertRaises(drowse.InvalidRequest) as e:
            a.migrate("elsewhere", hooks="skip")
        self.assertIn("in no cluster", str(e.exception))

    def test_parameters(self) -> None:
        a = self.make(name="a")
        f = a.files
        f.write("/n", "1", uid=7, gid=8, if_none_match="*")
        self.assertEqual((f.stat("/n", link=True))["kind"], "file")
        f.mkdir("/t", mode="0700")
        f.upload_tree("/t", b"".join([p for p in f.download_tree("/n")]), uid=7, gid=8)
        events = f.watch("/t", recursive=True, keep_awake=True)
        self.assertEqual((next(events))["event"], "ready")
        events.close()
        row = self.client.call("GET", "/v1/sandboxes/a", etag=True)
        self.assertEqual((a.update(purpose="p", if_match=row.etag))["purpose"], "p")
        a.secrets.set("key", "v", uid=7, gid=8, transient=True)
        a.secrets.set("of", source="ours", proxy=True)
        self.assertEqual([(s["name"], s.get("from")) for s in a.secrets.list()], [("key", None), ("of", "ours")])
        job = a.processes.start(["terminal"], tty=(24, 80), user="u", cwd="/", env={"A": "b"}, timeout_seconds=60, output_kib=64)
        with a.processes.attach(job) as p:
            self.assertEqual((next(p)).data, b"24x80 ")
        with a.exec(["flood"], detach=True, output_kib=64, hold_output=True) as p:
            self.assertEqual(sum([len(o.data) for o in p]), 32 << 20)  # nothing was lost
        a.processes.start(["true"], no_stdin=True, hold_output=True)
        tap = self.make(policy=DENY)
        whole = (tap.snapshot(hooks="skip"))["snapshot"]
        c = self.client.snapshots.clone(whole, policy={"default": {"egress": "allow"}}, idle={"sleep_seconds": 3600}, metadata={"purpose": "copy"})
        self.assertEqual(((c.policy()).value["default"]["egress"], c.info["purpose"]), ("allow", "copy"))
        shot = (a.snapshot(disk_only=True))["snapshot"]
        a.sleep()
        b = self.make(name="b", disk=shot)
        self.assertEqual(b.files.read("/n"), b"1")
        op = self.client.images.pull("debian:bookworm", include=["git"], tag="x", platform="linux/amd64", no_cache=True)
        self.client.operations.cancel(op["id"])
        b.stop(kill=True)


if __name__ == "__main__":
    unittest.main()
