import { CommandFailed, ConnectionFailed, DrowseError, NotFound, ProtocolError, items, textOf } from "./errors.js";
import { HTTP, lines, whole, wait, type Body, type CallOptions, type RequestOptions, type SocketClass } from "./http.js";
import { Port, Process, completed, exitOf, windowBytes, type Completed } from "./process.js";
import type * as types from "./types.js";

type Spec = NonNullable<types.CreateRequest["spec"]>;
type Metadata = NonNullable<types.CreateRequest["metadata"]>;
type JSONObject = Record<string, unknown>;

/** Where the server is, and bounds of all calls. */
export interface DrowseOptions {
  /** http:// or https://, with a path if the API is below one; DROWSE_URL by default. */
  url?: string;
  /** DROWSE_TOKEN by default. */
  token?: string;
  /** Milliseconds until an answer begins; 600,000 by default. */
  timeoutMs?: number;
  /** Further tries of what may be repeated: reads, and creations, whose idempotency key makes that one counts. 2 by default. */
  retries?: number;
  /** The domain of the server's gateway, for Sandbox.url; DROWSE_GATEWAY by default. */
  gateway?: string;
  fetch?: typeof fetch;
  /** A class as the browsers' WebSocket, where there is none. */
  WebSocket?: SocketClass;
}

export interface Keyed extends CallOptions {
  /** By default a new one for each call; a second call with the same key gets the first one's answer. */
  idempotencyKey?: string;
}

/** What to create: fields of the API's spec and metadata. A template that fits is used, unless `boot` is true. */
export type CreateOptions = Omit<Spec, "policy" | "tags"> & Omit<Metadata, "asked" | "expiry_told"> & { policy?: types.Policy; disk?: string; get_or_create?: boolean; boot?: boolean };

const metadataFields = new Set(["class", "owner", "purpose", "tags", "expires", "keep", "persist", "rotate", "wake", "gateway"]);
const documentFields = new Set(["disk", "get_or_create", "boot"]);

/** A command: a list of words, or a text for sh -c. */
export type Command = string | string[];

export interface ExecOptions extends CallOptions {
  /** Say that stdin is written to. */
  stdin?: boolean;
  tty?: { rows: number; cols: number; term?: string };
  user?: string;
  cwd?: string;
  env?: Record<string, string>;
  /** After how long it is killed; never by default. */
  timeoutSeconds?: number;
  /** Let it outlive the stream. */
  detach?: boolean;
  /** The name of a detached process. */
  process?: string;
  /** How much of the newest output of a detached process is kept for attach; 256 by default. */
  outputKiB?: number;
  /** Let a detached process wait instead of losing older output. */
  holdOutput?: boolean;
}

export interface RunOptions extends CallOptions {
  stdin?: string | Uint8Array;
  user?: string;
  cwd?: string;
  env?: Record<string, string>;
  /** After how long it is killed: 60 by default, 3600 at most. */
  timeoutSeconds?: number;
  /** Throw CommandFailed for another exit code than 0. */
  check?: boolean;
}

const seg = encodeURIComponent;

function query(values: Record<string, unknown>): string {
  const q = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== undefined && one !== false && one !== "") q.append(name, one === true ? "1" : String(one));
    }
  }
  const text = q.toString();
  return text && "?" + text;
}

function key(o: Keyed): Record<string, string> {
  const random = () => Array.from(crypto.getRandomValues(new Uint8Array(16)), (b) => b.toString(16).padStart(2, "0")).join("");
  return { "Idempotency-Key": o.idempotencyKey ?? random() };
}

/** Drops what is not given. */
function given<T extends object>(o: T): T {
  return Object.fromEntries(Object.entries(o).filter(([, v]) => v !== undefined)) as T;
}

const argv = (c: Command) => (typeof c === "string" ? ["sh", "-c", c] : c);
const environment = (env?: Record<string, string>) => env && Object.entries(env).map(([k, v]) => `${k}=${v}`);

function toBase64(data: string | Uint8Array): string {
  const bytes = typeof data === "string" ? new TextEncoder().encode(data) : data;
  let text = "";
  for (let i = 0; i < bytes.length; i += 8192) text += String.fromCharCode(...bytes.subarray(i, i + 8192));
  return btoa(text);
}

function fromBase64(text: string): Uint8Array {
  try {
    return Uint8Array.from(atob(textOf(text)), (c) => c.charCodeAt(0));
  } catch (e) {
    throw e instanceof DrowseError ? e : new ProtocolError("the answer's output is not base64");
  }
}

function startOf(command: Command, o: ExecOptions): types.ExecStartRequest {
  return given({
    command: argv(command), user: o.user, cwd: o.cwd, env: environment(o.env), tty: o.tty, stdin: o.stdin || undefined,
    timeout_seconds: o.timeoutSeconds, detach: o.detach, process: o.process, output_kib: o.outputKiB, hold_output: o.holdOutput,
  });
}

/** A client of one server. */
export class Drowse {
  readonly http: HTTP;
  readonly gateway: string;
  readonly snapshots = new Snapshots(this);
  readonly images = new Images(this);
  readonly volumes = new Volumes(this);
  readonly operations = new Operations(this);
  readonly templates = new Templates(this);

  constructor(o: DrowseOptions = {}) {
    const env = (globalThis as { process?: { env?: Record<string, string | undefined> } }).process?.env ?? {};
    const url = o.url ?? env["DROWSE_URL"] ?? "";
    if (!/^https?:\/\/[^/]/.test(url)) throw new DrowseError(`url "${url}": use http://HOST:PORT or https://HOST, also in DROWSE_URL`);
    this.gateway = o.gateway ?? env["DROWSE_GATEWAY"] ?? "";
    this.http = new HTTP({
      url: url.replace(/\/+$/, ""), token: o.token ?? env["DROWSE_TOKEN"] ?? "", timeoutMs: o.timeoutMs ?? 600_000, retries: o.retries ?? 2,
      fetch: o.fetch ?? ((...args) => fetch(...args)), WebSocket: o.WebSocket ?? (globalThis as { WebSocket?: SocketClass }).WebSocket,
    });
  }

  /** Sends a request with JSON, and returns the JSON of its answer: for requests that have no method here. */
  async call<T = unknown>(method: string, path: string, body?: object, o: RequestOptions = {}): Promise<T> {
    return (await this.tagged<T>(method, path, body, o)).value;
  }

  /** Does what call does, and returns the ETag too. */
  async tagged<T>(method: string, path: string, body?: object, o: RequestOptions = {}): Promise<{ value: T; etag: string }> {
    const headers = { ...o.headers };
    if (body) headers["Content-Type"] = "application/json";
    const retry = ["GET", "PUT", "DELETE"].includes(method) || "Idempotency-Key" in headers;
    return this.http.json<T>(method, path, { ...o, headers, retry, ...(body && { body: JSON.stringify(body) }) });
  }

  version(o?: CallOptions) {
    return this.call<types.Is>("GET", "/v1/version", undefined, o);
  }

  /** Says what the server's checks found; throws ServerError if one fails. */
  health(o?: CallOptions) {
    return this.call<types.Health>("GET", "/healthz", undefined, o);
  }

  /** Says whether sandboxes can be woken on the host; throws ServerError if not. */
  ready(o?: CallOptions) {
    return this.call<types.Health>("GET", "/readyz", undefined, o);
  }

  /** Says what the host has for its sandboxes, and how many there are by status. */
  host(o?: CallOptions) {
    return this.call<types.Host>("GET", "/v1/host", undefined, o);
  }

  /** Lists where secrets may come from: `from` of Secrets.set. */
  async secretSources(o?: CallOptions) {
    return items((await this.call<types.SecretSources>("GET", "/v1/secret-sources", undefined, o)).sources);
  }

  /** Does what metadata say is to be done by now, or with dryRun says what that would be. */
  prune(o: CallOptions & { dryRun?: boolean } = {}) {
    return this.call<types.Pruned>("POST", "/v1/prune", { dry_run: o.dryRun ?? false }, o);
  }

  /** Makes a sandbox and boots it. */
  async create(what: CreateOptions, o: Keyed = {}): Promise<Sandbox> {
    const spec: JSONObject = {}, metadata: JSONObject = {}, doc: JSONObject = { spec, metadata };
    for (const [name, value] of Object.entries(given(what))) {
      (metadataFields.has(name) ? metadata : documentFields.has(name) ? doc : spec)[name] = value;
    }
    if (what.policy && !what.network) spec["network"] = "tap";
    const made = await this.call<types.Sandbox>("POST", "/v1/sandboxes", doc, { ...o, headers: key(o) });
    return new Sandbox(this, textOf(made.name), made);
  }

  /** Returns a handle of a sandbox, without asking whether it exists. */
  sandbox(name: string): Sandbox {
    return new Sandbox(this, name);
  }

  /** Returns a handle of a sandbox that exists. */
  async get(name: string, o?: CallOptions): Promise<Sandbox> {
    const b = new Sandbox(this, name);
    await b.refresh(o);
    return b;
  }

  /** Yields sandboxes in the order of their names. */
  async *list(filter: { owner?: string; tag?: string | string[]; class?: string; status?: string | string[]; page?: number } = {}, o?: CallOptions): AsyncGenerator<Sandbox, void, void> {
    const { page, ...rest } = filter;
    for (let after = ""; ; ) {
      const doc = await this.call<types.List>("GET", "/v1/sandboxes" + query({ ...rest, limit: page ?? 100, after }), undefined, o);
      for (const one of items(doc.sandboxes)) yield new Sandbox(this, textOf(one.name), one);
      if (!doc.next) return;
      after = doc.next;
    }
  }

  /** Yields events; "now" or a cursor says from where. After a broken connection, go on with the last cursor. */
  events(filter: { since?: number | "now"; follow?: boolean; type?: string | string[]; sandbox?: string; owner?: string; tag?: string } = {}, o: { signal?: AbortSignal } = {}): AsyncGenerator<types.EventLine, void, void> {
    const path = "/v1/events" + query({ follow: true, ...filter });
    return lines((signal) => this.http.request("GET", path, { signal, timeoutMs: Infinity, retry: true }), o.signal);
  }
}

/** A handle of a sandbox. What works inside it wakes it first. */
export class Sandbox {
  readonly files: Files;
  readonly processes: Processes;
  readonly secrets: Secrets;
  readonly services: Services;

  constructor(readonly client: Drowse, private named: string, public info?: types.Sandbox) {
    this.files = new Files(this);
    this.processes = new Processes(this);
    this.secrets = new Secrets(this);
    this.services = new Services(this);
  }

  get name(): string {
    return this.named;
  }

  get path(): string {
    return "/v1/sandboxes/" + seg(this.named);
  }

  private async changed(method: string, path: string, body: object | undefined, o?: RequestOptions): Promise<types.Sandbox> {
    return (this.info = await this.client.call<types.Sandbox>(method, this.path + path, body, o));
  }

  /** Reads what is known of it, also into `info`. It does not wake it. */
  refresh(o?: CallOptions) {
    return this.changed("GET", "", undefined, o);
  }

  /** Changes fields; only if it still has the ETag ifMatch. */
  update(changes: types.ChangesRequest, o: CallOptions & { ifMatch?: string } = {}) {
    return this.changed("PATCH", "", changes, { ...o, headers: o.ifMatch ? { "If-Match": o.ifMatch } : {} });
  }

  /** Removes it, running or not. Removing what is not there succeeds. */
  delete(o?: CallOptions) {
    return this.client.call<types.Freed>("DELETE", this.path, undefined, o);
  }

  /** Puts it to sleep; with durable, it waits until the other hosts of its cluster can wake it. */
  sleep(o: CallOptions & types.SleepRequest = {}) {
    const { hooks, durable, ...call } = o;
    return this.client.call<types.SleepResult>("POST", this.path + "/sleep", given({ hooks, durable }), call);
  }

  wake(o?: CallOptions) {
    return this.changed("POST", "/wake", {}, o);
  }

  /** Brings it up: wakes it, or boots it if it has stopped. */
  start(o?: CallOptions) {
    return this.changed("POST", "/start", {}, o);
  }

  /** Shuts it down. Its memory is lost, its disk stays. */
  stop(o: CallOptions & types.StopRequest = {}) {
    const { kill, timeout_seconds, ...call } = o;
    return this.changed("POST", "/stop", given({ kill, timeout_seconds }), call);
  }

  /** Moves it to another host of the server's cluster, awake if it is. For tokens with the scope admin. */
  migrate(to: string, o: CallOptions & { hooks?: string } = {}) {
    const { hooks, ...call } = o;
    return this.client.call<types.MigrateResult>("POST", this.path + "/migrate", given({ to, hooks }), call);
  }

  /** Lets it expire later. */
  extend(until: Date, o?: CallOptions) {
    return this.changed("POST", "/extend", { until: until.toISOString() }, o);
  }

  async rename(to: string, o?: CallOptions): Promise<void> {
    await this.changed("POST", "/rename", { to }, o);
    this.named = to;
  }

  /** Makes children that go on from this moment, each with the processes and files of their parent. */
  async fork(children: number | Array<{ name?: string; tags?: string[] }> = 1, o: Keyed = {}): Promise<Sandbox[]> {
    const list = typeof children === "number" ? Array.from({ length: children }, () => ({})) : children;
    const doc = await this.client.call<types.Forked>("POST", this.path + "/fork", { children: list }, { ...o, headers: key(o) });
    return items(doc.sandboxes).map((one) => new Sandbox(this.client, textOf(one.name), one));
  }

  /** Writes a snapshot: its id is `snapshot` of the result. */
  snapshot(what: types.SnapshotRequest = {}, o: Keyed = {}) {
    return this.client.call<types.SleepResult>("POST", this.path + "/snapshot", what, { ...o, headers: key(o) });
  }

  async listSnapshots(o?: CallOptions): Promise<types.SnapshotInfo[]> {
    return items((await this.client.call<types.Snapshots>("GET", this.path + "/snapshots", undefined, o)).snapshots);
  }

  /** Goes back to one of its snapshots. */
  rewind(snapshot: string, o?: CallOptions) {
    return this.changed("POST", "/restore", { snapshot }, o);
  }

  /** Says which relatives exist: from the parent up, and the direct children. */
  async lineage(o?: CallOptions): Promise<{ ancestors: string[]; children: string[] }> {
    const me = await this.refresh(o);
    const byID = new Map<string, types.Sandbox>();
    const children: string[] = [], ancestors: string[] = [];
    for await (const { info } of this.client.list({}, o)) {
      byID.set(info!.id, info!);
      if (info!.parent_id === me.id) children.push(info!.name);
    }
    for (let at = byID.get(me.parent_id ?? ""); at && !ancestors.includes(at.name); at = byID.get(at.parent_id ?? "")) ancestors.push(at.name);
    return { ancestors, children };
  }

  /** Returns its network policy, with the ETag for setPolicy. */
  policy(o?: CallOptions): Promise<{ value: types.Policy; etag: string }> {
    return this.client.tagged("GET", this.path + "/policy", undefined, o);
  }

  /** Replaces its network policy; only if the present one still has the ETag ifMatch, else PreconditionFailed. */
  setPolicy(policy: NonNullable<types.Policy>, o: CallOptions & { ifMatch?: string } = {}) {
    return this.client.call<types.PolicyResult>("PUT", this.path + "/policy", policy, { ...o, headers: o.ifMatch ? { "If-Match": o.ifMatch } : {} });
  }

  /** Copies what is to be promoted to the host now. */
  async promote(o?: CallOptions) {
    return items((await this.client.call<types.Promoted>("POST", this.path + "/promote", {}, o)).promoted);
  }

  /** Says what was run in it and when it slept, the newest first. */
  history(o: CallOptions & { limit?: number; before?: Date } = {}) {
    return this.client.call<types.History>("GET", this.path + "/history" + query({ limit: o.limit, before: o.before?.toISOString() }), undefined, o);
  }

  /** Returns its whole record. */
  inspect(o?: CallOptions) {
    return this.client.call<JSONObject>("GET", this.path + "/inspect", undefined, o);
  }

  /** Says whom the gateway lets in, and returns the token; update with gateway and new_gateway_token changes both. */
  gateway(o?: CallOptions) {
    return this.client.call<types.GatewayAccess>("GET", this.path + "/gateway", undefined, o);
  }

  /** Says what its network has passed and denied. It must run. */
  network(o?: CallOptions) {
    return this.client.call<types.NetworkStats>("GET", this.path + "/network", undefined, o);
  }

  private lines<T extends object>(path: string, o: { signal?: AbortSignal }): AsyncGenerator<T, void, void> {
    return lines<T>((signal) => this.client.http.request("GET", this.path + path, { signal, timeoutMs: Infinity }), o.signal);
  }

  /** Yields the last denied packets, and with follow those to come. It must run. */
  networkEvents(o: { follow?: boolean; signal?: AbortSignal } = {}) {
    return this.lines<types.NetEventLine>("/network/events" + query({ follow: o.follow }), o);
  }

  /** Returns its open flows, and the last that have ended or were denied. It must run. */
  flows(o?: CallOptions) {
    return this.client.call<types.Flows>("GET", this.path + "/flows", undefined, o);
  }

  /** Yields flows as they open, end or are denied. It must run. */
  followFlows(o: { signal?: AbortSignal } = {}) {
    return this.lines<types.FlowRecordLine>("/flows/follow", o);
  }

  /** Yields what was done in it, the oldest first; trailer adds a last line on the trail. */
  audit(o: { since?: Date; follow?: boolean; trailer?: boolean; signal?: AbortSignal } = {}) {
    return this.lines<types.EntryLine>("/audit" + query({ since: o.since?.toISOString(), follow: o.follow, trailer: o.trailer }), o);
  }

  /** Yields the paths that differ between its disk and its image; the last line has `end`. */
  diff(o: { limit?: number; signal?: AbortSignal } = {}) {
    return this.lines<types.DiffLine>("/diff" + query({ limit: o.limit }), o);
  }

  /** Returns the last bytes of its console, and with follow those to come, until it stops. */
  async console(o: CallOptions & { tail?: number; follow?: boolean } = {}): Promise<ReadableStream<Uint8Array>> {
    const call = o.follow ? { timeoutMs: Infinity, ...o } : o;
    return (await this.client.http.request("GET", this.path + "/console" + query({ tail: o.tail, follow: o.follow }), call)).body!;
  }

  /** Says what it uses. It must run. */
  stats(o?: CallOptions) {
    return this.client.call<types.Stats>("GET", this.path + "/stats", undefined, o);
  }

  /** Runs a command to its end, and keeps the first MiB of each stream. */
  async run(command: Command, o: RunOptions = {}): Promise<Completed> {
    const seconds = o.timeoutSeconds ?? 60;
    const body = given({
      command: argv(command), user: o.user, cwd: o.cwd, env: environment(o.env), timeout_seconds: seconds, stdin: o.stdin && toBase64(o.stdin),
    });
    const doc = await this.client.call<types.Executed>("POST", this.path + "/exec", body, { signal: o.signal, timeoutMs: o.timeoutMs ?? (seconds + 120) * 1000 });
    const exit = exitOf(doc);
    const out = completed(exit, fromBase64(doc.stdout), fromBase64(doc.stderr), doc.truncated ?? false);
    if (o.check && exit.code !== 0) {
      throw new CommandFailed(`${JSON.stringify(command)} ended with ${exit.code}: ${exit.notStarted || new TextDecoder().decode(out.stderr.subarray(-500))}`, out);
    }
    return out;
  }

  /** Starts a command with streams. The signal ends them at any time. */
  exec(command: Command, o: ExecOptions = {}): Promise<Process> {
    return Process.open(this.client.http, this.path + "/exec", startOf(command, o), o);
  }

  /** Starts a command with a terminal, by default a shell. */
  terminal(command: Command = ["sh", "-l"], o: ExecOptions = {}): Promise<Process> {
    return this.exec(command, { tty: { rows: 24, cols: 80 }, ...o });
  }

  /** Returns the address of a port behind the server's gateway. */
  url(port: number, scheme = "https"): string {
    if (!this.client.gateway) throw new DrowseError("the gateway's domain is not known: give `gateway`, or set DROWSE_GATEWAY");
    return `${scheme}://${port}-${this.named}.${this.client.gateway}`;
  }

  /** Connects to a TCP port, through the API. */
  connect(port: number, o: CallOptions = {}): Promise<Port> {
    return Port.open(this.client.http, `${this.path}/ports/${port}`, o);
  }
}

/** What was started in a sandbox, and is not forgotten. */
export class Processes {
  constructor(private readonly box: Sandbox) {}

  /** It does not wake the sandbox, which must run. */
  async list(o?: CallOptions) {
    return items((await this.box.client.call<types.Processes>("GET", this.box.path + "/processes", undefined, o)).processes);
  }

  /** Starts a process that goes on by itself, and returns its name; attach writes to its stdin, unless noStdin. */
  async start(command: Command, o: Omit<ExecOptions, "stdin" | "detach"> & Keyed & { noStdin?: boolean } = {}): Promise<string> {
    const body = { ...startOf(command, o), ...given({ no_stdin: o.noStdin }) };
    return (await this.box.client.call<types.Started>("POST", this.box.path + "/processes", body, { signal: o.signal, timeoutMs: o.timeoutMs, headers: key(o) })).process;
  }

  /** Connects to a detached process, in the place of any other stream; output from offset on, as far as it is kept. */
  attach(process: string, o: CallOptions & { offset?: number } = {}): Promise<Process> {
    return Process.open(this.box.client.http, `${this.box.path}/processes/${seg(process)}/attach?offset=${o.offset ?? 0}&window=${windowBytes}`, undefined, o);
  }

  async signal(process: string, signal: number, o?: CallOptions): Promise<void> {
    await this.box.client.call("POST", `${this.box.path}/processes/${seg(process)}/signal`, { signal }, o);
  }

  /** Kills it if it runs, and forgets it. */
  async remove(process: string, o?: CallOptions): Promise<void> {
    await this.box.client.call("DELETE", `${this.box.path}/processes/${seg(process)}`, undefined, o);
  }
}

const binary = { "Content-Type": "application/octet-stream" };

/** The files of a sandbox. Paths are absolute. */
export class Files {
  constructor(private readonly box: Sandbox) {}

  private where(rest: string) {
    return this.box.path + "/files" + rest;
  }

  /** Returns a file's content, of at most `most` bytes: use stream for more. */
  async read(path: string, o: CallOptions & { most?: number } = {}): Promise<Uint8Array> {
    const most = o.most ?? 64 << 20;
    const answer = await this.box.client.http.request("GET", this.where(query({ path })), { ...o, retry: true });
    try {
      return await whole(answer, most);
    } catch (e) {
      if (o.signal?.aborted) throw o.signal.reason;
      throw e instanceof DrowseError ? e : new ConnectionFailed("the file was cut", { cause: e });
    }
  }

  /** Returns a file's content as text. */
  async readText(path: string, o?: CallOptions & { most?: number }): Promise<string> {
    return new TextDecoder().decode(await this.read(path, o));
  }

  /** Returns a file's content, or a part of it, as it comes. */
  async stream(path: string, o: CallOptions & { offset?: number; length?: number } = {}): Promise<ReadableStream<Uint8Array>> {
    if (o.length === 0) return new Blob([]).stream();
    const from = o.offset ?? 0;
    const headers: Record<string, string> = from || o.length !== undefined ? { Range: `bytes=${from}-${o.length === undefined ? "" : from + o.length - 1}` } : {};
    return (await this.box.client.http.request("GET", this.where(query({ path })), { ...o, headers, retry: true })).body!;
  }

  /** Writes a file. mode is octal digits. ifMatch: only if it has that ETag; ifNoneMatch "*": only if there is none. */
  async write(path: string, data: Body, o: CallOptions & { mode?: string; parents?: boolean; append?: boolean; uid?: number; gid?: number; ifMatch?: string; ifNoneMatch?: "*" } = {}): Promise<types.FileInfo> {
    const { mode, parents, append, uid, gid } = o;
    const headers = { ...binary, ...(o.ifMatch && { "If-Match": o.ifMatch }), ...(o.ifNoneMatch && { "If-None-Match": o.ifNoneMatch }) };
    const retry = !append && !o.ifMatch && !o.ifNoneMatch;
    return (await this.box.client.http.json<types.FileInfo>("PUT", this.where(query({ path, mode, parents, append, uid, gid })), { ...o, headers, body: data, retry })).value;
  }

  /** Describes a file; with link, a symbolic link itself. */
  stat(path: string, o: CallOptions & { link?: boolean } = {}) {
    return this.box.client.call<types.FileInfo>("GET", this.where("/stat" + query({ path, link: o.link })), undefined, o);
  }

  async exists(path: string, o?: CallOptions): Promise<boolean> {
    try {
      await this.stat(path, o);
      return true;
    } catch (e) {
      if (e instanceof NotFound && e.code === "guest-not-found") return false;
      throw e;
    }
  }

  async list(path: string, o?: CallOptions): Promise<types.FileInfo[]> {
    return items((await this.box.client.call<types.Directory>("GET", this.where("/list" + query({ path })), undefined, o)).entries);
  }

  async mkdir(path: string, o: CallOptions & { mode?: string; parents?: boolean } = {}): Promise<void> {
    await this.box.client.call("POST", this.where("/mkdir"), given({ path, mode: o.mode, parents: o.parents }), o);
  }

  async move(from: string, to: string, o?: CallOptions): Promise<void> {
    await this.box.client.call("POST", this.where("/move"), { from, to }, o);
  }

  async remove(path: string, o: CallOptions & { recursive?: boolean } = {}): Promise<void> {
    await this.box.client.call("DELETE", this.where(query({ path, recursive: o.recursive })), undefined, o);
  }

  /** Returns a tar archive of a directory as it comes. */
  async downloadTree(path: string, o?: CallOptions): Promise<ReadableStream<Uint8Array>> {
    return (await this.box.client.http.request("GET", this.where("/tree" + query({ path })), o)).body!;
  }

  /** Unpacks a tar archive, and returns its size. */
  async uploadTree(path: string, tar: Body, o: CallOptions & { uid?: number; gid?: number } = {}): Promise<number> {
    const { uid, gid, ...call } = o;
    return (await this.box.client.http.json<types.Moved>("PUT", this.where("/tree" + query({ path, uid, gid })), { ...call, headers: { "Content-Type": "application/x-tar" }, body: tar })).value.bytes;
  }

  /** Yields what happens to files below a directory; the first event is "ready". */
  watch(path: string, o: { recursive?: boolean; keepAwake?: boolean; signal?: AbortSignal } = {}): AsyncGenerator<types.FileEventLine, void, void> {
    const where = this.where("/watch" + query({ path, recursive: o.recursive, keep_awake: o.keepAwake }));
    return lines((signal) => this.box.client.http.request("GET", where, { signal, timeoutMs: Infinity }), o.signal);
  }
}

/** The secrets of a sandbox. Values are never given back. */
export class Secrets {
  constructor(private readonly box: Sandbox) {}

  async list(o?: CallOptions) {
    return items((await this.box.client.call<types.Secrets>("GET", this.box.path + "/secrets", undefined, o)).secrets);
  }

  /** Set a secret to a value, or without one to that of a source of the host: how.from. */
  async set(name: string, value: string | Uint8Array | undefined, how: Omit<types.SetSecretRequest, "value"> = {}, o?: CallOptions): Promise<void> {
    await this.box.client.call("PUT", `${this.box.path}/secrets/${seg(name)}`, value === undefined ? how : { ...how, value: toBase64(value) }, o);
  }

  async remove(name: string, o?: CallOptions): Promise<void> {
    await this.box.client.call("DELETE", `${this.box.path}/secrets/${seg(name)}`, undefined, o);
  }
}

/** Programs that the agent of a sandbox keeps running. */
export class Services {
  constructor(private readonly box: Sandbox) {}

  private path(name: string, verb = "") {
    return `${this.box.path}/services/${seg(name)}${verb}`;
  }

  /** It does not wake the sandbox. */
  async list(o?: CallOptions): Promise<types.Service[]> {
    return items((await this.box.client.call<types.Services>("GET", this.box.path + "/services", undefined, o)).services);
  }

  /** Adds or replaces a service. */
  set(name: string, argv: string[], what: Omit<types.SetServiceRequest, "name" | "argv"> = {}, o?: CallOptions) {
    return this.box.client.call<types.Service>("PUT", this.path(name), { ...what, argv }, o);
  }

  async remove(name: string, o?: CallOptions): Promise<void> {
    await this.box.client.call("DELETE", this.path(name), undefined, o);
  }

  start(name: string, o?: CallOptions) {
    return this.box.client.call<types.Service>("POST", this.path(name, "/start"), {}, o);
  }

  restart(name: string, o?: CallOptions) {
    return this.box.client.call<types.Service>("POST", this.path(name, "/restart"), {}, o);
  }

  /** Stops it until it is started, or the sandbox boots. */
  stop(name: string, o?: CallOptions) {
    return this.box.client.call<types.Service>("POST", this.path(name, "/stop"), {}, o);
  }

  /** Waits until it is ready, which keeps the sandbox awake: 60 s by default, 600 s at most. */
  wait(name: string, o: CallOptions & { timeoutSeconds?: number } = {}) {
    return this.box.client.call<types.Service>("GET", this.path(name, "/wait") + query({ timeout_seconds: o.timeoutSeconds }), undefined, o);
  }

  /** Returns its newest output, and with follow what comes. */
  async log(name: string, o: CallOptions & { follow?: boolean } = {}): Promise<ReadableStream<Uint8Array>> {
    const call = o.follow ? { timeoutMs: Infinity, ...o } : o;
    return (await this.box.client.http.request("GET", this.path(name, "/log") + query({ follow: o.follow }), call)).body!;
  }
}

/** The snapshots of all sandboxes. */
export class Snapshots {
  constructor(private readonly client: Drowse) {}

  async list(o?: CallOptions): Promise<types.SnapshotInfo[]> {
    return items((await this.client.call<types.Snapshots>("GET", "/v1/snapshots", undefined, o)).snapshots);
  }

  get(id: string, o?: CallOptions) {
    return this.client.call<types.SnapshotInfo>("GET", "/v1/snapshots/" + seg(id), undefined, o);
  }

  async remove(id: string, o?: CallOptions): Promise<void> {
    await this.client.call("DELETE", "/v1/snapshots/" + seg(id), undefined, o);
  }

  /** Replaces its tags. */
  tag(id: string, tags: string[], o?: CallOptions) {
    return this.client.call<types.SnapshotInfo>("POST", `/v1/snapshots/${seg(id)}/tags`, { tags }, o);
  }

  /** Makes a sandbox that goes on from a snapshot. */
  async clone(id: string, what: types.CloneRequest = {}, o: Keyed = {}): Promise<Sandbox> {
    const made = await this.client.call<types.Sandbox>("POST", `/v1/snapshots/${seg(id)}/clone`, what, { ...o, headers: key(o) });
    return new Sandbox(this.client, textOf(made.name), made);
  }

  /** Returns a file that import reads on another host. */
  async export(id: string, o?: CallOptions): Promise<ReadableStream<Uint8Array>> {
    return (await this.client.http.request("GET", `/v1/snapshots/${seg(id)}/export`, o)).body!;
  }

  async import(data: Body, o?: CallOptions): Promise<types.Imported> {
    return (await this.client.http.json<types.Imported>("POST", "/v1/snapshots/import", { ...o, headers: binary, body: data })).value;
  }
}

/** The images of the host. */
export class Images {
  constructor(private readonly client: Drowse) {}

  async list(o?: CallOptions): Promise<types.Image[]> {
    return items((await this.client.call<types.ImageList>("GET", "/v1/images", undefined, o)).images);
  }

  get(ref: string, o?: CallOptions) {
    return this.client.call<types.Image>("GET", "/v1/images/" + seg(ref), undefined, o);
  }

  remove(ref: string, o?: CallOptions) {
    return this.client.call<types.ImageRemoved>("DELETE", "/v1/images/" + seg(ref), undefined, o);
  }

  /** Begins to get an image, docker://REFERENCE or debian:SUITE: operations.wait waits for its end. */
  pull(from: string, what: Omit<types.PullRequest, "from"> = {}, o: Keyed = {}) {
    return this.client.call<types.Operation>("POST", "/v1/images/pull", { ...what, from }, { ...o, headers: key(o) });
  }

  async import(data: Body, tag: string, format: "oci-archive" | "docker-archive" | "tar" = "oci-archive", o?: CallOptions): Promise<types.Image> {
    return (await this.client.http.json<types.Image>("POST", "/v1/images/import" + query({ format, tag }), { ...o, headers: binary, body: data })).value;
  }

  async export(ref: string, format: "erofs" | "tar" | "oci-archive" = "oci-archive", o?: CallOptions): Promise<ReadableStream<Uint8Array>> {
    return (await this.client.http.request("GET", `/v1/images/${seg(ref)}/export` + query({ format }), o)).body!;
  }
}

/** Disks that outlive their sandboxes. */
export class Volumes {
  constructor(private readonly client: Drowse) {}

  async list(o?: CallOptions): Promise<types.Volume[]> {
    return items((await this.client.call<types.Volumes>("GET", "/v1/volumes", undefined, o)).volumes);
  }

  get(name: string, o?: CallOptions) {
    return this.client.call<types.Volume>("GET", "/v1/volumes/" + seg(name), undefined, o);
  }

  create(name: string, sizeMiB: number, o: Keyed = {}) {
    return this.client.call<types.Volume>("POST", "/v1/volumes", { name, size_mib: sizeMiB }, { ...o, headers: key(o) });
  }

  resize(name: string, sizeMiB: number, o?: CallOptions) {
    return this.client.call<types.Volume>("POST", `/v1/volumes/${seg(name)}/resize`, { size_mib: sizeMiB }, o);
  }

  async remove(name: string, o?: CallOptions): Promise<void> {
    await this.client.call("DELETE", "/v1/volumes/" + seg(name), undefined, o);
  }
}

/** What goes on after its request, such as a pull. */
export class Operations {
  constructor(private readonly client: Drowse) {}

  async list(o?: CallOptions): Promise<types.Operation[]> {
    return items((await this.client.call<types.Operations>("GET", "/v1/operations", undefined, o)).operations);
  }

  get(id: string, o?: CallOptions) {
    return this.client.call<types.Operation>("GET", "/v1/operations/" + seg(id), undefined, o);
  }

  cancel(id: string, o?: CallOptions) {
    return this.client.call<types.Operation>("DELETE", "/v1/operations/" + seg(id), undefined, o);
  }

  /** Waits until it has ended, which may be a failure: see its state and error. progress gets each change. */
  async wait(id: string, progress?: (is: types.Operation) => void, o: { signal?: AbortSignal } = {}): Promise<types.Operation> {
    for (let pause = 50, last = ""; ; pause = Math.min(1000, pause * 1.5)) {
      const is = await this.get(id, o);
      if (JSON.stringify(is) !== last) progress?.(is);
      if (is.state !== "running") return is;
      last = JSON.stringify(is);
      await wait(pause, o.signal);
    }
  }
}

/** First boots from which sandboxes start. */
export class Templates {
  constructor(private readonly client: Drowse) {}

  async list(o?: CallOptions): Promise<types.Template[]> {
    return items((await this.client.call<types.Templates>("GET", "/v1/templates", undefined, o)).templates);
  }

  get(key: string, o?: CallOptions) {
    return this.client.call<types.Template>("GET", "/v1/templates/" + seg(key), undefined, o);
  }

  /** Begins to boot one: operations.wait waits for its end. */
  create(what: types.TemplateSpecRequest, o: Keyed = {}) {
    return this.client.call<types.Operation>("POST", "/v1/templates", what, { ...o, headers: key(o) });
  }

  /** Removes it. Sandboxes that were made from it stay. */
  async remove(key: string, o?: CallOptions): Promise<void> {
    await this.client.call("DELETE", "/v1/templates/" + seg(key), undefined, o);
  }
}
