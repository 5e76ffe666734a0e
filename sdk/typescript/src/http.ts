import { ConnectionFailed, DeadlineExceeded, DrowseError, ProtocolError, errorOf, objectOf } from "./errors.js";

/** What can be sent as a body. Browsers send a stream only over HTTP/2, and not all do: use a Blob there. */
export type Body = string | Uint8Array | Blob | ReadableStream<Uint8Array> | AsyncIterable<Uint8Array> | Iterable<Uint8Array>;

/** Bounds of a call. An aborted call throws the signal's reason. */
export interface CallOptions {
  signal?: AbortSignal | undefined;
  /** Milliseconds until the answer begins, or is there if it is JSON; of all tries together. */
  timeoutMs?: number | undefined;
}

export interface RequestOptions extends CallOptions {
  headers?: Record<string, string>;
  body?: Body;
  retry?: boolean;
}

/** The part of the WebSocket of browsers that is used. */
export interface Socket {
  binaryType: string;
  readonly readyState: number;
  send(data: string | Uint8Array): void;
  close(): void;
  onopen: ((event: any) => void) | null;
  onmessage: ((event: any) => void) | null;
  onclose: ((event: any) => void) | null;
  onerror: ((event: any) => void) | null;
}

export type SocketClass = new (url: string, protocols: string[]) => Socket;

const longestPause = 5; // seconds that the server may ask to wait before a retry
const maxLine = 16 << 20; // characters
const maxDocument = 64 << 20;
const maxError = 1 << 20;
const maxWaiting = 64 << 20; // bytes of messages that nobody has taken

export interface HTTPOptions {
  url: string;
  token: string;
  timeoutMs: number;
  retries: number;
  fetch: typeof fetch;
  WebSocket: SocketClass | undefined;
}

/** Sends requests. */
export class HTTP {
  constructor(private readonly o: HTTPOptions) {}

  /** Sends a request, and returns its answer once its header is there; throws APIError for one of 400 and more. */
  async request(method: string, path: string, o: RequestOptions = {}): Promise<Response> {
    return this.tried(method, path, o, async (answer) => answer);
  }

  /** Sends a request, and returns its answer's JSON, and its ETag. */
  async json<T>(method: string, path: string, o: RequestOptions = {}): Promise<{ value: T; etag: string }> {
    return this.tried(method, path, o, async (answer) => {
      const text = new TextDecoder().decode(await whole(answer, maxDocument));
      return { value: (text ? objectOf(text) : {}) as T, etag: answer.headers.get("etag") ?? "" };
    });
  }

  private async tried<T>(method: string, path: string, o: RequestOptions, take: (answer: Response) => Promise<T>): Promise<T> {
    const again = o.body === undefined || typeof o.body === "string" || o.body instanceof Uint8Array || o.body instanceof Blob;
    const limit = o.timeoutMs ?? this.o.timeoutMs;
    const deadline = Date.now() + limit;
    for (let tries = o.retry && again ? this.o.retries : 0; ; tries--) {
      let pause = 0.05;
      try {
        return await this.once(method, path, o, deadline - Date.now(), take);
      } catch (e) {
        const after = (e as { retryAfter?: number }).retryAfter;
        if (after !== undefined && after <= longestPause) pause = after;
        else if (!(e instanceof ConnectionFailed)) throw e;
        if (tries <= 0) throw e;
      }
      if (Date.now() + pause * 1000 > deadline) throw new DeadlineExceeded("the time is up");
      await wait(pause * 1000, o.signal);
    }
  }

  private async once<T>(method: string, path: string, o: RequestOptions, ms: number, take: (answer: Response) => Promise<T>): Promise<T> {
    const headers: Record<string, string> = { ...o.headers };
    if (this.o.token) headers["Authorization"] = "Bearer " + this.o.token;
    o.signal?.throwIfAborted();
    const end = new AbortController();
    // It stays while the body is read: the listener keeps nothing alive but the controller.
    o.signal?.addEventListener("abort", () => end.abort(o.signal!.reason), { once: true });
    const timer = Number.isFinite(ms) ? setTimeout(() => end.abort(new DeadlineExceeded("the time is up")), Math.min(Math.max(ms, 0), 0x7fffffff)) : undefined;
    try {
      const init: RequestInit & { duplex?: "half" } = { method, headers, signal: end.signal, redirect: "error" };
      if (o.body !== undefined) {
        const body = bodyOf(o.body);
        init.body = body as BodyInit;
        if (body instanceof ReadableStream) init.duplex = "half";
      }
      const answer = await this.o.fetch(this.o.url + path, init);
      if (answer.status < 400) return await take(answer);
      const text = new TextDecoder().decode(await whole(answer, maxError));
      let error: unknown;
      try {
        error = objectOf<{ error?: unknown }>(text).error;
      } catch {
        // It is not from the server itself.
      }
      const after = answer.headers.get("retry-after");
      throw errorOf(answer.status, error, after && /^\d{1,9}$/.test(after) ? Number(after) : undefined);
    } catch (e) {
      if (end.signal.aborted) throw end.signal.reason;
      if (e instanceof DrowseError) throw e;
      throw new ConnectionFailed(`${method} ${path}: ${(e as Error).message}`, { cause: e });
    } finally {
      clearTimeout(timer);
    }
  }

  /** Opens a WebSocket. If that fails, it asks without one for the reason, which a WebSocket does not tell. */
  async socket(path: string, o: CallOptions): Promise<Messages> {
    const make = this.o.WebSocket;
    if (!make) {
      throw new DrowseError("there is no WebSocket: use Node 22, or Node 20 with --experimental-websocket, or give one of a package as the option WebSocket");
    }
    o.signal?.throwIfAborted();
    const protocols = ["drowse.v1"];
    if (this.o.token) protocols.push("drowse.bearer." + this.o.token);
    const ws = new make(this.o.url.replace(/^http/, "ws") + path, protocols);
    const messages = new Messages(ws, o.signal);
    const timer = setTimeout(() => messages.fail(new DeadlineExceeded("the time is up")), Math.min(o.timeoutMs ?? this.o.timeoutMs, 0x7fffffff));
    try {
      await messages.opened;
      return messages;
    } catch (e) {
      if (!(e instanceof ConnectionFailed)) throw e;
      try {
        await this.request("GET", path, { ...o, retry: true });
      } catch (why) {
        if ((why as { status?: number }).status !== 426) throw why;
      }
      throw e;
    } finally {
      clearTimeout(timer);
    }
  }
}

/** The messages of a WebSocket. Those that nobody has taken wait: the server's window bounds them. */
export class Messages {
  readonly opened: Promise<void>;
  private waiting: Array<string | Uint8Array> = [];
  private held = 0; // bytes
  private error: unknown;
  private over = false;
  private wake: Array<() => void> = [];
  private refuse: (e: unknown) => void = () => {};
  private readonly aborted = () => this.fail(this.signal!.reason);

  constructor(private readonly ws: Socket, private readonly signal: AbortSignal | undefined) {
    ws.binaryType = "arraybuffer";
    this.opened = new Promise((done, refuse) => {
      ws.onopen = () => done();
      this.refuse = refuse;
    });
    this.opened.catch(() => {});
    ws.onmessage = (m) => {
      if (this.over) return;
      const message = typeof m.data === "string" ? m.data : new Uint8Array(m.data as ArrayBuffer);
      this.held += message.length + 64; // what keeps it costs memory too
      if (this.held > maxWaiting) return this.fail(new ProtocolError(`more than ${maxWaiting} bytes wait to be read`));
      this.waiting.push(message);
      this.changed();
    };
    ws.onclose = ws.onerror = () => this.end();
    signal?.addEventListener("abort", this.aborted, { once: true });
  }

  private changed() {
    const wake = this.wake;
    this.wake = [];
    for (const w of wake) w();
  }

  private end() {
    this.over = true;
    this.signal?.removeEventListener("abort", this.aborted);
    this.refuse(this.error ?? new ConnectionFailed("the WebSocket cannot be opened"));
    this.changed();
  }

  /** Ends the connection for a reason that waiting and later calls throw. */
  fail(error: unknown) {
    if (this.over) return;
    this.error = error;
    this.waiting = [];
    this.close();
  }

  /** Takes the next message if one is there. */
  take(): string | Uint8Array | undefined {
    if (this.error !== undefined) throw this.error;
    const message = this.waiting.shift();
    if (message !== undefined) this.held -= message.length + 64;
    return message;
  }

  /** Whether the connection has ended, and all messages are taken. */
  get ended(): boolean {
    return this.over && this.waiting.length === 0;
  }

  /** Waits for a message or the end. */
  async more(): Promise<void> {
    if (this.waiting.length > 0 || this.over) return;
    await new Promise<void>((done) => this.wake.push(done));
  }

  send(data: string | Uint8Array) {
    if (this.error !== undefined) throw this.error;
    if (this.over || this.ws.readyState !== 1) throw new ConnectionFailed("the stream has ended");
    this.ws.send(data);
  }

  close() {
    this.end();
    this.ws.onopen = this.ws.onmessage = null;
    this.ws.onclose = this.ws.onerror = () => {};
    this.ws.close();
  }
}

/** Returns the whole body of an answer, of at most `most` bytes. */
export async function whole(answer: Response, most: number): Promise<Uint8Array> {
  const parts: Uint8Array[] = [];
  let n = 0;
  const reader = answer.body?.getReader();
  try {
    for (let next = await reader?.read(); next && !next.done; next = await reader?.read()) {
      parts.push(next.value);
      if ((n += next.value.length) > most) throw new DrowseError(`the answer has more than ${most} bytes: read it as a stream`);
    }
  } catch (e) {
    await reader?.cancel().catch(() => {});
    throw e;
  }
  return join(parts);
}

export function join(parts: Uint8Array[]): Uint8Array {
  const out = new Uint8Array(parts.reduce((n, p) => n + p.length, 0));
  let at = 0;
  for (const p of parts) {
    out.set(p, at);
    at += p.length;
  }
  return out;
}

function bodyOf(body: Body): string | Uint8Array | Blob | ReadableStream<Uint8Array> {
  if (typeof body === "string" || body instanceof Uint8Array || body instanceof Blob || body instanceof ReadableStream) return body;
  const pieces = Symbol.asyncIterator in body ? body[Symbol.asyncIterator]() : body[Symbol.iterator]();
  return new ReadableStream<Uint8Array>({
    async pull(to) {
      const next = await pieces.next();
      if (next.done) to.close();
      else to.enqueue(next.value);
    },
    async cancel() {
      await pieces.return?.();
    },
  });
}

/** Waits, and throws the signal's reason when it is aborted. */
export async function wait(ms: number, signal: AbortSignal | undefined): Promise<void> {
  signal?.throwIfAborted();
  await new Promise<void>((done, fail) => {
    const stop = () => {
      clearTimeout(timer);
      fail(signal!.reason);
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener("abort", stop);
      done();
    }, ms);
    signal?.addEventListener("abort", stop, { once: true });
  });
}

/** Yields the objects of an answer that is lines of JSON, without the empty lines that keep it open. */
export async function* lines<T extends object>(open: (signal: AbortSignal) => Promise<Response>, signal: AbortSignal | undefined): AsyncGenerator<T, void, void> {
  const stop = new AbortController();
  const reader = (await open(signal ? AbortSignal.any([signal, stop.signal]) : stop.signal)).body!.getReader();
  try {
    const text = new TextDecoder();
    for (let rest = ""; ; ) {
      let next;
      try {
        next = await reader.read();
      } catch (e) {
        if (signal?.aborted) throw signal.reason;
        throw new ConnectionFailed("the stream was cut", { cause: e });
      }
      if (next.done) return;
      const all = (rest + text.decode(next.value, { stream: true })).split("\n");
      rest = all.pop()!;
      if (rest.length > maxLine) throw new ProtocolError("a line of the answer is too long");
      for (const line of all) if (line.trim()) yield objectOf<T>(line);
    }
  } finally {
    stop.abort();
  }
}
