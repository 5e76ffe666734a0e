// What the methods do, against the server that sdk/sdktest starts.
import assert from "node:assert/strict";
import { randomBytes } from "node:crypto";
import { readFileSync, readdirSync } from "node:fs";
import { createServer, type Server } from "node:http";
import type { AddressInfo } from "node:net";
import { after, afterEach, describe, it } from "node:test";
import * as drowse from "drowse";
import { WebSocket as Packaged } from "ws";
import { Drowse, type CreateOptions, type Sandbox } from "drowse";

const env = (name: string) => process.env[name] ?? "";
const DENY = { default: { egress: "deny" as const } };
const bytes = (text: string) => new TextEncoder().encode(text);
const text = (data: Uint8Array | undefined) => new TextDecoder().decode(data);

async function all(stream: AsyncIterable<Uint8Array>): Promise<Uint8Array> {
  const parts: Uint8Array[] = [];
  for await (const p of stream) parts.push(p);
  return Buffer.concat(parts);
}

async function collect<T>(items: AsyncIterable<T>): Promise<T[]> {
  const out: T[] = [];
  for await (const one of items) out.push(one);
  return out;
}

/** Waits for a condition that another process or the server makes true. */
async function until(what: string, ok: () => Promise<boolean>) {
  for (let i = 0; i < 1200; i++) {
    if (await ok()) return;
    await new Promise((done) => setTimeout(done, 25));
  }
  assert.fail("not in time: " + what);
}

describe("the client", { skip: env("DROWSE_URL") ? false : "there is no server: make test-sdk" }, () => {
  const client = new Drowse({ url: env("DROWSE_URL") || "http://127.0.0.1:1" });
  const make = (more: Partial<CreateOptions> = {}): Promise<Sandbox> => client.create({ image: "test", ...more });
  afterEach(async () => {
    for await (const b of client.list()) await b.delete();
  });

  it("creates, lists, gets and deletes", async () => {
    const a = await make({ name: "a", memory_mib: 256, tags: ["x"], class: "resumable", purpose: "a test" });
    assert.deepEqual([a.info!.memory_mib, a.info!.class, a.info!.tags], [256, "resumable", ["x"]]);
    await make({ name: "b" });
    const c = await make();
    assert.deepEqual((await collect(client.list({ page: 1 }))).map((b) => b.name).sort(), ["a", "b", c.name].sort());
    assert.deepEqual((await collect(client.list({ tag: "x", status: ["running", "asleep"] }))).map((b) => b.name), ["a"]);
    assert.equal((await client.get("a")).info!.purpose, "a test");
    assert.equal((await make({ name: "a", get_or_create: true })).info!.id, a.info!.id);
    await a.delete();
    await a.delete();
    await assert.rejects(client.get("a"), (e: drowse.APIError) => e instanceof drowse.NotFound && e.status === 404 && e.code === "not-found" && e.remedy !== "");
    assert.equal((await client.version()).version, "test");
  });

  it("repeats a creation whose answer was lost, and makes one", async () => {
    const flaky = new Drowse({ url: env("TEST_FLAKY_URL") });
    const a = await flaky.create({ image: "test" });
    assert.equal((await flaky.sandbox(a.name).fork(2)).length, 2);
    assert.equal((await collect(client.list())).length, 3);
    const once = new Drowse({ url: env("TEST_FLAKY_URL"), retries: 0 });
    await assert.rejects(once.create({ image: "test" }), drowse.ConnectionFailed);
    await client.create({ image: "test", name: "k" }, { idempotencyKey: "mine" });
    await client.create({ image: "test", name: "k" }, { idempotencyKey: "mine" });
    await assert.rejects(client.create({ image: "test", name: "other" }, { idempotencyKey: "mine" }), drowse.KeyReused);
  });

  it("throws errors by their kind", async () => {
    const a = await make({ name: "a" });
    const kinds = [["wrong", drowse.Unauthorized, 401], [env("TEST_READ_TOKEN"), drowse.Forbidden, 403], [env("TEST_OTHER_TOKEN"), drowse.NotFound, 404]] as const;
    for (const [token, kind, status] of kinds) {
      const other = new Drowse({ token });
      await assert.rejects(other.sandbox("a").run(["true"]), (e: drowse.APIError) => e instanceof kind && e.status === status && !e.message.includes(token));
      await assert.rejects(other.sandbox("a").exec(["true"]), kind);
    }
    await assert.rejects(make({ name: "a" }), (e: drowse.APIError) => e instanceof drowse.Conflict && e.code === "exists");
    await assert.rejects(make({ memory_mib: -1 }), (e: drowse.APIError) => e instanceof drowse.InvalidRequest && e.field === "spec.memory_mib");
    await assert.rejects(a.run([]), drowse.InvalidRequest);
    await assert.rejects(a.exec([]), (e: drowse.APIError) => e instanceof drowse.InvalidRequest && e.code === "invalid" && e.field === "command");
    const slow = new Drowse({ token: env("TEST_SLOW_TOKEN"), retries: 0 });
    await assert.rejects(async () => {
      for (let i = 0; i < 10; i++) await slow.version();
    }, (e: drowse.APIError) => e instanceof drowse.TooManyRequests && e.retryAfter! > 0);
    const patient = new Drowse({ token: env("TEST_SLOW_TOKEN") });
    await patient.version();
    await patient.version();
    await assert.rejects(new Drowse({ url: "http://127.0.0.1:1", retries: 0 }).version(), drowse.ConnectionFailed);
    assert.throws(() => new Drowse({ url: "ftp://somewhere" }), drowse.DrowseError);
  });

  it("runs commands", async () => {
    const a = await make();
    const r = await a.run(["run"], { stdin: "some text" });
    assert.deepEqual([r.code, text(r.stdout), text(r.stderr), r.text], [3, "some text", "hello", "some text"]);
    assert.equal((await a.run(["where"], { user: "dev", cwd: "/srv", env: { A: "b" } })).text, "dev /srv A=b");
    await assert.rejects(a.run(["run"], { check: true }), (e: drowse.CommandFailed<drowse.Completed>) => e.result.code === 3);
    assert.equal((await a.run(["sleep", "60"], { timeoutSeconds: 1 })).exit.timedOut, true);
    assert.equal((await a.run("exit 1")).code, 127);
    await assert.rejects(a.run(["sleep", "60"], { timeoutMs: 200 }), drowse.DeadlineExceeded);
    assert.equal((await a.run(["true"])).code, 0);
  });

  it("streams commands", async () => {
    const a = await make();
    const p = await a.exec(["run"], { stdin: true });
    assert.ok(p.id && p.pid);
    await p.write("one ");
    await p.write(bytes("two"));
    p.closeStdin();
    const got = { stdout: "", stderr: "" };
    for await (const o of p) got[o.stream] += text(o.data);
    assert.deepEqual([got, p.exit!.code, p.offset], [{ stdout: "one two", stderr: "hello" }, 3, 12]);
    const big = randomBytes(3 << 20);
    const done = await (await a.exec(["cat"], { stdin: true })).communicate(big);
    assert.ok(done.code === 0 && big.equals(done.stdout));
    await assert.rejects((await a.exec(["flood"])).communicate(undefined, 1 << 20), drowse.DrowseError);
    const none = await a.exec(["nothing"]);
    assert.equal((await none.wait()).code, 127);
    assert.ok(none.exit!.notStarted);
    const over = await a.exec(["true"], { stdin: true });
    await over.wait();
    await assert.rejects(over.write("x"), drowse.DrowseError);
  });

  it("streams with the WebSocket of a package", async () => {
    await make({ name: "w" });
    const box = new Drowse({ url: env("DROWSE_URL"), WebSocket: Packaged }).sandbox("w");
    const data = new Uint8Array(randomBytes(1 << 20));
    const out = await (await box.exec(["cat"], { stdin: true })).communicate(data);
    assert.ok(Buffer.from(data).equals(out.stdout));
    await assert.rejects(new Drowse({ url: env("DROWSE_URL"), token: "wrong", WebSocket: Packaged }).sandbox("w").exec(["cat"]), drowse.Unauthorized);
  });

  it("stalls a command whose output nobody takes, and kills one that is left", async () => {
    const a = await make();
    const p = await a.exec(["flood"]);
    await p.read();
    let far = 0;
    for (let i = 0; i < 20; i++) far = (await a.files.exists("/flooded")) ? Number(await a.files.readText("/flooded")) : 0;
    assert.ok(far < 16, `${far} MiB`);
    let n = 0;
    for await (const o of p) n += o.data.length;
    assert.ok(n > 31 << 20 && p.exit!.code === 0);
    for await (const _ of await a.exec(["flood"])) break;
    const stop = new AbortController();
    const forever = await a.exec(["forever"], { signal: stop.signal });
    await until("it runs", () => a.files.exists("/forever"));
    const waiting = assert.rejects(forever.wait(), /enough/);
    stop.abort(new Error("enough"));
    await waiting;
    await until("it is killed", async () => (await a.files.readText("/forever")) === "killed");
  });

  it("has terminals with sizes and signals", async () => {
    const p = await (await make()).terminal(["terminal"]);
    const see = async (wanted: string, have = "") => {
      while (have !== wanted) have += text((await p.read())!.data);
    };
    await see("24x80 ");
    p.resize(50, 132);
    await see("50x132 ");
    p.signal(15);
    assert.equal((await p.wait()).signal, 15);
  });

  it("attaches to detached processes, also after a sleep", async () => {
    const a = await make();
    assert.equal(await a.processes.start(["echo1"], { process: "job" }), "job");
    const p = await a.processes.attach("job");
    await p.write("abc");
    let got = "";
    while (got !== "abc") got += text((await p.read())!.data);
    p.detach();
    const [one] = await a.processes.list();
    assert.deepEqual([one!.process, one!.output_end, one!.detached], ["job", 3, true]);
    const again = await a.processes.attach("job", { offset: 2 });
    assert.equal(text((await again.read())!.data), "c");
    await again.write("q");
    assert.equal((await again.wait()).code, 4);
    await a.processes.remove("job");
    const other = await a.exec(["forever"], { detach: true, process: "other" });
    await a.processes.signal("other", 9);
    assert.equal((await other.wait()).signal, 9);
    await assert.rejects(a.processes.attach("nothing"), drowse.NotFound);
    const third = await a.exec(["forever"], { detach: true, process: "third" });
    await a.delete();
    await assert.rejects(third.wait(), drowse.DrowseError);
  });

  it("reads, writes and moves files", async () => {
    const f = (await make()).files;
    const info = await f.write("/d/x", "hello world", { mode: "0640", parents: true });
    assert.deepEqual([info.size, info.mode, await f.readText("/d/x")], [11, "0640", "hello world"]);
    assert.equal(text(await all(await f.stream("/d/x", { offset: 6, length: 3 }))), "wor");
    assert.equal((await all(await f.stream("/d/x", { length: 0 }))).length, 0);
    await f.write("/d/x", "!", { append: true });
    const big = randomBytes(5 << 20);
    await f.write("/big", (async function* () {
      for (let i = 0; i < big.length; i += 70001) yield big.subarray(i, i + 70001);
    })());
    assert.ok(big.equals(await all(await f.stream("/big"))));
    await assert.rejects(f.read("/big", { most: 1 << 20 }), drowse.DrowseError);
    assert.deepEqual((await f.list("/d")).map((e) => e.name), ["x"]);
    const { etag } = await f.stat("/d/x");
    await assert.rejects(f.write("/d/x", "", { ifNoneMatch: "*" }), drowse.PreconditionFailed);
    await assert.rejects(f.write("/d/x", "", { ifMatch: '"0-0"' }), drowse.PreconditionFailed);
    await f.write("/d/x", "new", { ifMatch: etag! });
    await f.mkdir("/e/f", { parents: true });
    await f.move("/d/x", "/e/f/y");
    assert.deepEqual([await f.exists("/d/x"), (await f.stat("/e/f/y")).kind], [false, "file"]);
    await assert.rejects(f.remove("/e"), drowse.DrowseError);
    const tar = await all(await f.downloadTree("/e"));
    await f.mkdir("/copy");
    assert.ok((await f.uploadTree("/copy", tar)) > 0);
    await f.remove("/e", { recursive: true });
    await assert.rejects(f.read("/e/f/y"), (e: drowse.APIError) => e instanceof drowse.NotFound && e.code === "guest-not-found");
    await f.mkdir("/w");
    const events = f.watch("/w");
    assert.equal((await events.next()).value!.event, "ready");
    await f.write("/w/x", "1");
    assert.ok(["created", "written"].includes((await events.next()).value!.event!));
    await events.return();
  });

  it("sleeps, wakes, stops, renames, and follows events", async () => {
    const a = await make({ name: "through" });
    const events = client.events({ since: 0, sandbox: "through" });
    await a.files.write("/kept", "1");
    assert.ok((await a.sleep()).snapshot);
    assert.deepEqual([(await a.refresh()).status, (await a.wake()).status], ["asleep", "running"]);
    await a.sleep({ hooks: "skip" });
    assert.deepEqual([await a.files.readText("/kept"), (await a.refresh()).status], ["1", "running"]);
    let woken = 0, seen = 0;
    for await (const e of events) if ((woken += /wake|woke/.test(e.type) ? 1 : 0) >= 2 || ++seen > 30) break;
    assert.equal(woken, 2);
    await a.sleep();
    assert.equal((await (await a.exec(["cat"], { stdin: true })).communicate("woken")).text, "woken");
    assert.deepEqual([(await a.stop()).status, (await a.start()).status], ["stopped", "running"]);
    assert.equal((await a.update({ tags: ["t"] })).tags![0], "t");
    await assert.rejects(a.update({ tags: [] }, { ifMatch: '"0"' }), drowse.PreconditionFailed);
    const e = await make({ class: "ephemeral", expires: "2090-01-01T00:00:00Z" });
    assert.match((await e.extend(new Date("2091-01-01"))).expires!, /^2091/);
    await a.sleep();
    await a.rename("z");
    assert.deepEqual([a.name, (await a.run(["true"])).code, (await a.stats()).name], ["z", 0, "z"]);
  });

  it("forks, takes snapshots, rewinds and clones", async () => {
    const a = await make({ name: "a" });
    await a.files.write("/x", "1");
    const kids = await a.fork([{ name: "k1", tags: ["kid"] }, { name: "k2" }]);
    const [grand] = await kids[0]!.fork();
    assert.equal(await grand!.files.readText("/x"), "1");
    assert.deepEqual([(await grand!.lineage()).ancestors, (await a.lineage()).children], [["k1", "a"], ["k1", "k2"]]);
    const shot = (await a.snapshot({ note: "before" })).snapshot;
    await a.files.write("/x", "2");
    await a.sleep();
    await a.rewind(shot);
    assert.equal(await a.files.readText("/x"), "1");
    assert.ok((await a.listSnapshots()).some((s) => s.id === shot));
    assert.equal((await client.snapshots.get(shot)).note, "before");
    assert.deepEqual((await client.snapshots.tag(shot, ["good"])).tags, ["good"]);
    const c = await client.snapshots.clone(shot, { name: "c" });
    assert.deepEqual([c.name, await c.files.readText("/x")], ["c", "1"]);
    const data = await all(await client.snapshots.export(shot));
    await assert.rejects(client.snapshots.import(data), (e: drowse.APIError) => e instanceof drowse.Conflict && e.code === "snapshot-exists");
  });

  it("has policies, secrets, volumes, images, operations and ports", async () => {
    const a = await make({ name: "a", policy: DENY });
    const was = await a.policy();
    await a.setPolicy({ default: { egress: "allow" } }, { ifMatch: was.etag });
    await assert.rejects(a.setPolicy(DENY, { ifMatch: was.etag }), drowse.PreconditionFailed);
    await a.secrets.set("key", "value", { mode: 0o400 });
    assert.deepEqual((await a.secrets.list()).map((s) => [s.name, s.size]), [["key", 5]]);
    await a.secrets.remove("key");
    assert.equal((await client.volumes.create("data", 16)).size_bytes, 16 << 20);
    assert.equal((await client.volumes.resize("data", 32)).size_bytes, 32 << 20);
    assert.deepEqual((await client.volumes.list()).map((v) => v.name), ["data"]);
    await client.volumes.remove("data");
    const copy = await client.images.import(await all(await client.images.export("test")), "copy");
    assert.ok(copy.id);
    await client.images.remove("copy");
    await assert.rejects(client.images.get("copy"), drowse.NotFound);
    const states: string[] = [];
    const op = await client.images.pull("docker://127.0.0.1:1/none:x");
    assert.equal((await client.operations.wait(op.id, (is) => states.push(is.state))).state, "failed");
    assert.equal(states.at(-1), "failed");
    const c = await a.connect(80);
    c.write("ping");
    assert.equal(text(await c.read()), "PING");
    assert.equal(await c.read(), undefined);
    c.close();
    await assert.rejects(a.connect(81), drowse.APIError);
    assert.throws(() => a.url(80), drowse.DrowseError);
    assert.equal(new Drowse({ gateway: "boxes.example.org" }).sandbox("a").url(8000), "https://8000-a.boxes.example.org");
  });

  it("describes the host, and prunes", async () => {
    await make({ name: "a", class: "resumable", owner: "them", tags: ["y"] });
    const made = await collect(client.events({ follow: false, type: "sandbox.created", owner: "them", tag: "y", since: 0 }));
    assert.ok(made.some((e) => e.sandbox === "a"));
    assert.deepEqual([(await client.health()).ok, (await client.ready()).ok], [true, true]);
    assert.deepEqual((await client.host()).sandboxes, { running: 1 });
    assert.deepEqual(await client.secretSources(), [{ name: "ours", kind: "file", owners: ["us"] }]);
    const old = await make({ name: "old", class: "ephemeral", owner: "us" });
    assert.deepEqual((await collect(client.list({ owner: "us", class: "ephemeral" }))).map((b) => b.name), ["old"]);
    await old.update({ expires: "2020-01-01T00:00:00Z" });
    assert.deepEqual((await client.prune({ dryRun: true })).remove!.map((r) => r.name), ["old"]);
    assert.equal((await collect(client.list())).length, 2);
    await client.prune();
    assert.deepEqual((await collect(client.list())).map((b) => b.name), ["a"]);
  });

  it("makes and removes templates", async () => {
    const op = await client.operations.wait((await client.templates.create({ image: "test", memory_mib: 128 })).id);
    assert.equal(op.state, "done", JSON.stringify(op));
    const made = await client.templates.get(op.template!);
    assert.deepEqual([made.state, made.memory_mib], ["ready", 128]);
    const ready = async () => (await client.templates.list()).filter((t) => t.state === "ready").map((t) => t.key);
    assert.deepEqual(await ready(), [made.key]);
    assert.equal((await (await make({ name: "a", memory_mib: 128 })).inspect())["template"], made.snapshot);
    assert.equal((await (await make({ name: "b", memory_mib: 128, boot: true })).inspect())["template"], undefined);
    await client.templates.remove(made.key);
    assert.deepEqual(await ready(), []);
  });

  it("has services", async () => {
    const s = (await make()).services;
    assert.equal((await s.set("main", ["run", "-"], { dir: "/" })).name, "main");
    assert.equal((await s.wait("main", { timeoutSeconds: 30 })).ready, true);
    assert.equal((await s.stop("main")).state, "stopped");
    assert.equal((await s.start("main")).state, "running");
    assert.equal((await s.restart("main")).state, "running");
    assert.deepEqual((await s.list()).map((one) => one.argv), [["run", "-"]]);
    assert.equal(text(await all(await s.log("main"))), "run -\n".repeat(3));
    const follows = (await s.log("main", { follow: true })).getReader();
    let log = "";
    while (log !== "run -\n".repeat(3)) log += text((await follows.read()).value);
    await s.restart("main");
    assert.equal(text((await follows.read()).value), "run -\n");
    await follows.cancel();
    await s.remove("main");
    assert.deepEqual(await s.list(), []);
  });

  it("tells of the network, and what was done", async () => {
    const a = await make({ name: "a", policy: DENY });
    assert.equal((await a.network()).name, "a");
    assert.deepEqual(await collect(a.networkEvents()), []);
    assert.deepEqual((await a.flows()).flows!.map((f) => f["peer"]), ["192.0.2.1"]);
    for await (const f of a.followFlows()) {
      assert.equal(f["peer"], "192.0.2.1");
      break;
    }
    const gateway = await a.gateway();
    await a.update({ gateway: { public_ports: [80] }, new_gateway_token: true });
    const now = await a.gateway();
    assert.deepEqual(now.public_ports, [80]);
    assert.notEqual(now.token, gateway.token);
    await a.run(["true"]);
    await a.run(["run"]);
    await a.sleep({ durable: false });
    const h = await a.history({ limit: 1, before: new Date("2090-01-01") });
    assert.deepEqual([h.runs!.map((r) => r.command), h.sleeps!.length], [[["run"]], 1]);
    assert.equal(((await a.inspect())["spec"] as { name: string }).name, "a");
    await a.wake();
    const said = await collect(a.audit({ since: new Date("2020-01-01"), trailer: true }));
    assert.deepEqual(said.filter((e) => e.argv).map((e) => e.argv), [["true"], ["run"]]);
    assert.ok("trailer" in said.at(-1)!);
    for await (const e of a.audit({ follow: true })) {
      assert.ok(e.kind);
      break;
    }
    assert.equal((await collect(a.diff({ limit: 10 }))).at(-1)!.end, true);
    assert.equal((await all(await a.console({ tail: 100 }))).length, 0);
    const console = await a.console({ follow: true });
    await a.stop({ timeout_seconds: 10 });
    assert.equal((await all(console)).length, 0);
    await a.start();
    await assert.rejects(a.migrate("elsewhere", { hooks: "skip" }), (e: drowse.APIError) => e instanceof drowse.InvalidRequest && /in no cluster/.test(e.message));
    await assert.rejects(a.promote(), (e: drowse.APIError) => e instanceof drowse.InvalidRequest && /is to be promoted/.test(e.message));
  });

  it("passes on parameters", async () => {
    const a = await make({ name: "a" });
    const f = a.files;
    await f.write("/n", "1", { uid: 7, gid: 8, ifNoneMatch: "*" });
    assert.equal((await f.stat("/n", { link: true })).kind, "file");
    await f.mkdir("/t", { mode: "0700" });
    await f.uploadTree("/t", await all(await f.downloadTree("/n")), { uid: 7, gid: 8 });
    const events = f.watch("/t", { recursive: true, keepAwake: true });
    assert.equal((await events.next()).value!.event, "ready");
    await events.return();
    const { etag } = await client.tagged("GET", a.path);
    assert.equal((await a.update({ purpose: "p" }, { ifMatch: etag })).purpose, "p");
    await a.secrets.set("key", "v", { uid: 7, gid: 8, transient: true });
    await a.secrets.set("of", undefined, { from: "ours", proxy: true });
    assert.deepEqual((await a.secrets.list()).map((s) => [s.name, s.from]), [["key", undefined], ["of", "ours"]]);
    const job = await a.processes.start(["terminal"], { tty: { rows: 24, cols: 80 }, user: "u", cwd: "/", env: { A: "b" }, timeoutSeconds: 60, outputKiB: 64 });
    const p = await a.processes.attach(job);
    assert.equal(text((await p.read())!.data), "24x80 ");
    p.detach();
    let n = 0;
    for await (const o of await a.exec(["flood"], { detach: true, outputKiB: 64, holdOutput: true })) n += o.data.length;
    assert.equal(n, 32 << 20); // nothing was lost
    await a.processes.start(["true"], { noStdin: true, holdOutput: true });
    const tap = await make({ policy: DENY });
    const whole = (await tap.snapshot({ hooks: "skip" })).snapshot;
    const c = await client.snapshots.clone(whole, { policy: { default: { egress: "allow" } }, idle: { sleep_seconds: 3600 }, metadata: { purpose: "copy" } });
    assert.deepEqual([(await c.policy()).value!.default!.egress, c.info!.purpose], ["allow", "copy"]);
    const shot = (await a.snapshot({ disk_only: true })).snapshot;
    await a.sleep();
    const b = await make({ name: "b", disk: shot });
    assert.equal(await b.files.readText("/n"), "1");
    await b.stop({ kill: true });
    const lone = (await c.snapshot()).snapshot;
    await c.delete();
    await client.snapshots.remove(lone);
    assert.ok(!(await client.snapshots.list()).some((s) => s.id === lone));
    const op = await client.images.pull("debian:bookworm", { include: ["git"], tag: "x", platform: "linux/amd64", no_cache: true });
    await client.operations.cancel(op.id);
    assert.ok((await client.operations.list()).some((o) => o.id === op.id));
    assert.ok((await client.images.list()).some((i) => i.id));
    assert.ok((await client.images.get("test")).id);
    await client.volumes.create("v", 16);
    assert.equal((await client.volumes.get("v")).name, "v");
    await client.volumes.remove("v");
  });

  it("does what its README says", async () => {
    const code = /```ts\n([^]*?)```/.exec(readFileSync("README.md", "utf8"))![1]!;
    const run = new Function("Drowse", "console", "url", "token", `return (async () => {${code.replace(/^import.*\n/gm, "").replace(/\{ url: .*? \}/, "{ url, token }").replace('"python:3.12"', '"test"').replace("npm test", "cat")}})()`);
    const said: unknown[] = [];
    await run(Drowse, { log: (...words: unknown[]) => said.push(...words) }, env("DROWSE_URL"), env("DROWSE_TOKEN"));
    assert.ok(said.length > 0);
  });
});

describe("a server that is not as it should be", () => {
  const servers: Server[] = [];
  const serve = async (answer: Parameters<typeof createServer>[1]) => {
    const s = createServer({}, answer as never);
    servers.push(s);
    await new Promise<void>((done) => s.listen(0, "127.0.0.1", done));
    return new Drowse({ url: `http://127.0.0.1:${(s.address() as AddressInfo).port}`, token: "hush", retries: 0, timeoutMs: 5000 });
  };
  after(() => servers.forEach((s) => s.close() && s.closeAllConnections()));

  it("gets no token by a redirect", async () => {
    let asked = "";
    const thief = createServer((r, w) => {
      asked = r.headers.authorization ?? "nothing";
      w.end("{}");
    });
    servers.push(thief);
    await new Promise<void>((done) => thief.listen(0, "127.0.0.1", done));
    const c = await serve((_, w) => w.writeHead(307, { Location: `http://127.0.0.1:${(thief.address() as AddressInfo).port}/` }).end());
    await assert.rejects(c.version(), drowse.ConnectionFailed);
    assert.equal(asked, "");
  });

  it("is an error of a kind, whatever it answers", async () => {
    for (const [status, body] of [
      [500, "<html>"], [200, "no JSON"], [200, "[]"], [200, "{}"], [200, '{"name":1}'], [200, "[".repeat(500_000)], [404, '{"error":null}'],
      [404, '{"error":"gone"}'], [500, '{"error":{"code":[]}}'], [503, ""], [500, "x".repeat(4 << 20)],
    ] as const) {
      const c = await serve((_, w) => w.writeHead(status).end(body));
      await assert.rejects(c.create({}), drowse.DrowseError, body.slice(0, 20));
    }
    const cut = await serve((_, w) => {
      w.writeHead(200, { "Content-Length": "100" });
      w.write("{");
      setTimeout(() => w.destroy(), 20);
    });
    await assert.rejects(cut.version(), drowse.ConnectionFailed);
    const silent = await serve(() => {});
    await assert.rejects(silent.version({ timeoutMs: 100 }), drowse.DeadlineExceeded);
    const stop = new AbortController();
    const waiting = assert.rejects(silent.version({ signal: stop.signal }), /mine/);
    stop.abort(new Error("mine"));
    await waiting;
  });
});

/** A WebSocket whose other end sends what it is told to. */
class Told {
  binaryType = "";
  readyState = 1;
  sent = 0;
  onopen: (() => void) | null = null;
  onmessage: ((e: { data: unknown }) => void) | null = null;
  onclose: (() => void) | null = null;
  onerror: (() => void) | null = null;
  static messages: Array<string | Uint8Array> = [];
  static last: Told;
  constructor() {
    Told.last = this;
    setTimeout(() => {
      this.onopen?.();
      for (const m of Told.messages) this.onmessage?.({ data: typeof m === "string" ? m : m.slice().buffer });
    });
  }
  send() {
    this.sent++;
  }
  close() {
    this.readyState = 3;
  }
}

describe("a stream that is not as it should be", () => {
  const box = new Drowse({ url: "http://127.0.0.1:1", WebSocket: Told }).sandbox("x");
  const started = '{"type":"started","pid":7}';
  for (const [name, messages] of Object.entries({
    "no JSON": [started, "<"], "a list": [started, "[]"], "null": [started, "null"], "a process without a number": ['{"type":"started"}'],
    "an exit without a code": [started, '{"type":"exit","exit":{}}'], "no exit": [started, '{"type":"exit","exit":null}'],
    "an error that is a text": [started, '{"type":"error","error":"x"}'], "an ack that is a text": [started, '{"type":"ack","bytes":"x"}'],
    "more output than the window": [started, ...Array<Uint8Array>(100).fill(new Uint8Array(32 << 10).fill(1))],
  })) {
    it(`is an error of the package: ${name}`, async () => {
      Told.messages = messages;
      const stop = new AbortController();
      await assert.rejects(async () => (await box.exec(["y"], { signal: stop.signal })).communicate(new Uint8Array(1 << 20)), drowse.DrowseError);
      assert.equal(Told.last.readyState, 3, "it is closed");
    });
  }

  it("does not fill the memory from a port that nobody reads", async () => {
    Told.messages = [started, ...Array<Uint8Array>(3000).fill(new Uint8Array(32 << 10))];
    await assert.rejects(async () => {
      for await (const _ of await box.connect(80));
    }, drowse.ProtocolError);
    assert.equal(Told.last.readyState, 3);
  });
});

it("imports no module, so that it runs in browsers", () => {
  const dir = new URL(import.meta.resolve("drowse"));
  for (const name of readdirSync(new URL(".", dir)).filter((n) => n.endsWith(".js"))) {
    const code = readFileSync(new URL(name, dir), "utf8");
    for (const [, from] of code.matchAll(/^(?:import|export)\b[^;]*?["']([^"';\n]+)["'];$/gm)) assert.match(from!, /^\.\//, name);
    assert.doesNotMatch(code, /\brequire\(|\bBuffer\b|__dirname/, name);
  }
});
