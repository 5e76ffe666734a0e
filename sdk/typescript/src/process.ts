import { APIError, ConnectionFailed, DrowseError, ProtocolError, StreamLost, errorOf, numberOf, objectOf } from "./errors.js";
import { join, type CallOptions, type HTTP, type Messages } from "./http.js";
import type { Control, ExecStartRequest } from "./types.js";

/** Bytes of output that wait here at most, and of stdin that the server has not passed on. */
export const windowBytes = 256 << 10;
const chunk = 32 << 10;

/** A piece of output. With a terminal all of it is stdout. */
export interface Output {
  stream: "stdout" | "stderr";
  data: Uint8Array;
}

/** How a process ended. The code is a shell's: 128 + n for signal n, 126 and 127 if it could not start. */
export interface Exit {
  code: number;
  signal: number;
  timedOut: boolean;
  notStarted: string;
}

export function exitOf(e: Partial<NonNullable<Control["exit"]>> | null | undefined): Exit {
  return { code: numberOf(e?.exit_code), signal: numberOf(e?.signal, 0), timedOut: Boolean(e?.timed_out), notStarted: String(e?.not_started ?? "") };
}

/** A command that has ended, and its output. */
export interface Completed {
  exit: Exit;
  code: number;
  stdout: Uint8Array;
  stderr: Uint8Array;
  /** Standard output as text. */
  text: string;
  truncated: boolean;
}

export function completed(exit: Exit, stdout: Uint8Array, stderr: Uint8Array, truncated: boolean): Completed {
  return { exit, code: exit.code, stdout, stderr, text: new TextDecoder().decode(stdout), truncated };
}

/**
 * A process of a sandbox, and the stream of its input and output. Iterating gives its output as it comes; what is not
 * taken stalls the process once 256 KiB wait here. close, a break out of the iteration or an abort ends the stream,
 * which kills a process that is not detached.
 */
export class Process implements AsyncIterable<Output> {
  id = "";
  pid = 0;
  /** The position in the output after the last byte that was taken: for attach. */
  offset = 0;
  /** How it ended, once that is known. */
  exit: Exit | undefined;
  private waiting: Output[] = [];
  private taken = 0;
  private told = 0;
  private sent = 0;
  private acked = 0;
  private held = 0;
  private error: unknown;

  private constructor(private readonly m: Messages) {}

  /** Opens a stream, and waits until the process runs. */
  static async open(http: HTTP, path: string, start: ExecStartRequest | undefined, o: CallOptions): Promise<Process> {
    const p = new Process(await http.socket(path, o));
    try {
      if (start) p.say({ type: "start", window: windowBytes, ...start });
      await p.until(() => (p.pid || p.exit ? true : undefined));
      return p;
    } catch (e) {
      p.close();
      throw e;
    }
  }

  private say(control: Control) {
    this.m.send(JSON.stringify(control));
  }

  /** Handles what has arrived. */
  private dispatch() {
    try {
      for (let m = this.m.take(); m !== undefined; m = this.m.take()) {
        if (typeof m !== "string") {
          if (m.length < 2) continue;
          if ((this.held += m.length - 1) > windowBytes + chunk) throw new ProtocolError("the server sends more output than was asked for");
          this.waiting.push({ stream: m[0] === 2 ? "stderr" : "stdout", data: m.subarray(1) });
          continue;
        }
        const c = objectOf<Control>(m);
        if (c.type === "started") {
          this.id = String(c.process ?? "");
          this.pid = numberOf(c.pid);
          this.offset = numberOf(c.offset, 0);
          if (this.pid <= 0) throw new ProtocolError("the process has no number");
        } else if (c.type === "ack") this.acked = numberOf(c.bytes, 0);
        else if (c.type === "exit") this.exit = exitOf(c.exit);
        else if (c.type === "error") this.error ??= errorOf(0, c.error);
      }
      if (this.m.ended && !this.exit) this.error ??= new StreamLost("the stream ended before its process", this.offset);
    } catch (e) {
      this.error ??= e;
      this.m.close();
    }
  }

  /** Returns what ready gives when it is not undefined; throws when that can no longer be. */
  private async until<T>(ready: () => T | undefined): Promise<T> {
    for (;;) {
      this.dispatch();
      const value = ready();
      if (value !== undefined) return value;
      if (this.error !== undefined) throw this.error;
      await this.m.more();
    }
  }

  /** Returns the next piece of output, or undefined at the end. */
  async read(): Promise<Output | undefined> {
    const out = await this.until(() => this.waiting.shift() ?? (this.exit ? null : undefined));
    if (out === null) return undefined;
    this.taken += out.data.length;
    this.held -= out.data.length;
    this.offset += out.data.length;
    if (this.taken - this.told >= windowBytes / 2 && !this.exit) {
      this.told = this.taken;
      try {
        this.say({ type: "ack", bytes: this.taken });
      } catch {
        // The next read says so.
      }
    }
    return out;
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<Output, void, void> {
    let whole = false;
    try {
      for (let out = await this.read(); out; out = await this.read()) yield out;
      whole = true;
    } finally {
      if (!whole) this.close();
    }
  }

  /** Writes to stdin. It waits while 256 KiB are on their way: the output must be taken meanwhile. */
  async write(data: string | Uint8Array): Promise<void> {
    let left = typeof data === "string" ? new TextEncoder().encode(data) : data;
    while (left.length > 0) {
      const room = await this.until(() => {
        if (this.exit) return 0;
        const n = Math.min(chunk, windowBytes - (this.sent - this.acked));
        return n > 0 && this.error === undefined ? n : undefined;
      });
      if (room === 0) throw new DrowseError("the process has ended");
      const part = left.subarray(0, room);
      left = left.subarray(room);
      this.sent += part.length;
      const message = new Uint8Array(1 + part.length);
      message.set(part, 1);
      this.m.send(message);
    }
  }

  closeStdin() {
    this.say({ type: "eof" });
  }

  /** Sends a signal to the process and its group. */
  signal(number: number) {
    this.say({ type: "signal", signal: number });
  }

  /** Sets the size of the terminal. */
  resize(rows: number, cols: number) {
    this.say({ type: "resize", rows, cols });
  }

  /** Ends the stream, and leaves a detached process running. */
  detach() {
    this.say({ type: "detach" });
    this.m.close();
  }

  /** Waits for the end, and drops the output that was not taken. */
  async wait(): Promise<Exit> {
    while (await this.read());
    return this.exit!;
  }

  /** Sends stdin, and returns all output. More than `limit` bytes of output are an error. */
  async communicate(stdin?: string | Uint8Array | AsyncIterable<Uint8Array>, limit = 16 << 20): Promise<Completed> {
    const out: Record<Output["stream"], Uint8Array[]> = { stdout: [], stderr: [] };
    const feed = async () => {
      if (stdin === undefined) return;
      try {
        for await (const piece of typeof stdin === "string" || stdin instanceof Uint8Array ? [stdin] : stdin) await this.write(piece);
        if (!this.exit) this.closeStdin();
      } catch (e) {
        this.dispatch();
        if (!this.exit) throw e; // else it has ended without reading all
      }
    };
    const collect = async () => {
      let n = 0;
      for await (const o of this) {
        if ((n += o.data.length) > limit) throw new DrowseError(`the output has more than ${limit} bytes: iterate over it, or raise the limit`);
        out[o.stream].push(o.data);
      }
    };
    const fed = feed();
    fed.catch(() => this.close()); // what failed is thrown below
    try {
      await collect();
    } catch (e) {
      if (e instanceof APIError || e instanceof DrowseError === false || !(e instanceof StreamLost)) throw e;
      await fed;
      throw e;
    }
    await fed;
    return completed(this.exit!, join(out.stdout), join(out.stderr), false);
  }

  /** Ends the stream. A process that is not detached is killed. */
  close() {
    this.m.close();
  }
}

/** A connection to a TCP port of a sandbox. Bytes that are not read wait in memory, for the protocol has no window: beyond 64 MiB it fails. */
export class Port implements AsyncIterable<Uint8Array> {
  private ended = false;
  private constructor(private readonly m: Messages) {}

  static async open(http: HTTP, path: string, o: CallOptions): Promise<Port> {
    const p = new Port(await http.socket(path, o));
    try {
      const first = await p.next();
      if (typeof first !== "string" || p.control(first) !== "started") throw new ConnectionFailed("the stream does not begin with a start");
      return p;
    } catch (e) {
      p.close();
      throw e;
    }
  }

  private async next(): Promise<string | Uint8Array> {
    for (;;) {
      const m = this.m.take();
      if (m !== undefined) return m;
      if (this.m.ended) throw new ConnectionFailed("the connection was cut");
      await this.m.more();
    }
  }

  private control(text: string): string {
    const c = objectOf<Control>(text);
    if (c.type === "error") throw errorOf(0, c.error);
    return c.type;
  }

  /** Returns some bytes, or undefined at the end. */
  async read(): Promise<Uint8Array | undefined> {
    while (!this.ended) {
      const m = await this.next();
      if (typeof m !== "string") return m;
      if (this.control(m) === "eof") this.ended = true;
    }
    return undefined;
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<Uint8Array, void, void> {
    for (let data = await this.read(); data; data = await this.read()) yield data;
  }

  write(data: string | Uint8Array) {
    const all = typeof data === "string" ? new TextEncoder().encode(data) : data;
    for (let i = 0; i < all.length; i += chunk) this.m.send(all.subarray(i, i + chunk));
  }

  /** Tells the other end that no more comes. */
  closeWrite() {
    this.m.send('{"type":"eof"}');
  }

  close() {
    this.m.close();
  }
}
