import type { Error as ErrorDocument } from "./types.js";

/** The root of all errors of this package. An aborted call throws its signal's reason instead. */
export class DrowseError extends Error {
  constructor(message: string, options?: ErrorOptions) {
    super(message, options);
    this.name = new.target.name;
  }
}

/** The server cannot be reached, or the connection broke. What was asked for may have been done. */
export class ConnectionFailed extends DrowseError {}

/** The call's timeout is over. What was asked for may have been done. */
export class DeadlineExceeded extends DrowseError {}

/** The answer is none of this API's: the address is another server's, or of another version. */
export class ProtocolError extends DrowseError {}

/** The stream of a process ended before the process. A detached one goes on: attach with `offset`. */
export class StreamLost extends ConnectionFailed {
  constructor(message: string, readonly offset: number) {
    super(message);
  }
}

/** A command ended other than with exit code 0, and the caller asked for an error then. */
export class CommandFailed<R = unknown> extends DrowseError {
  constructor(message: string, readonly result: R) {
    super(message);
  }
}

/**
 * An error that the server answered with. `code` is for programs, `remedy` says what to do, `field` is what is wrong in
 * the request ("spec.memory_mib"), if that is one thing. `status` is the HTTP status; of an error in a stream, 0.
 * `retryAfter` is how many seconds to wait before another try, if the server says so.
 */
export class APIError extends DrowseError {
  readonly code: string;
  readonly remedy: string;
  readonly field: string;
  readonly op: string;
  readonly sandbox: string;
  constructor(readonly status: number, error: Partial<ErrorDocument["error"]>, readonly retryAfter?: number) {
    const is = (value: unknown) => (typeof value === "string" ? value : "");
    const text = is(error.message) || is(error.code) || "error", remedy = is(error.remedy);
    super(remedy ? `${text} (${remedy})` : text);
    this.code = is(error.code) || "error";
    this.remedy = remedy;
    this.field = is(error.field);
    this.op = is(error.op);
    this.sandbox = is(error.sandbox);
  }
}

/** 400: the request is wrong. */
export class InvalidRequest extends APIError {}
/** 401: no token, or one that is unknown or expired. */
export class Unauthorized extends APIError {}
/** 403: the token lacks the right. */
export class Forbidden extends APIError {}
/** 404: there is no such sandbox, file, snapshot, image or volume, or it is another owner's. */
export class NotFound extends APIError {}
/** 409: the state does not allow it, or the name is taken. */
export class Conflict extends APIError {}
/** 412: it has changed since it was read. */
export class PreconditionFailed extends APIError {}
/** 422: another request had this idempotency key. */
export class KeyReused extends APIError {}
/** 429: too many requests, or the owner's limit is reached. */
export class TooManyRequests extends APIError {}
/** 5xx: the host or the guest has failed, or has no room at present. */
export class ServerError extends APIError {}

type Kind = new (status: number, error: Partial<ErrorDocument["error"]>, retryAfter?: number) => APIError;

const byStatus: Record<number, Kind> = {
  400: InvalidRequest, 401: Unauthorized, 403: Forbidden, 404: NotFound, 409: Conflict, 412: PreconditionFailed, 422: KeyReused,
  429: TooManyRequests,
};

// Codes of errors in streams, which have no status. Others count as the server's.
const byCode: Record<string, Kind> = {
  "invalid": InvalidRequest, "guest-invalid": InvalidRequest, "unauthorized": Unauthorized, "forbidden": Forbidden, "not-found": NotFound,
  "guest-not-found": NotFound, "exists": Conflict, "running": Conflict, "not-running": Conflict, "stopped": Conflict, "expired": Conflict,
  "crashed": Conflict, "ended": Conflict, "guest-exists": Conflict, "guest-denied": Conflict, "guest-refused": Conflict,
  "too-many": TooManyRequests, "owner-limit": TooManyRequests,
};

/** Returns the error for an answer, whose status is 0 in a stream. */
export function errorOf(status: number, said: unknown, retryAfter?: number): APIError {
  const error: Partial<ErrorDocument["error"]> = isObject(said) ? said : { message: status ? `HTTP status ${status}` : "error" };
  const kind = status ? byStatus[status] ?? (status >= 500 ? ServerError : APIError) : byCode[String(error.code)] ?? ServerError;
  return new kind(status, error, retryAfter);
}

const isObject = (value: unknown): value is Record<string, unknown> => typeof value === "object" && value !== null && !Array.isArray(value);

/** Returns the JSON object that a text is. */
export function objectOf<T extends object>(text: string): T {
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch {
    // It is said below.
  }
  if (!isObject(value)) throw new ProtocolError(`the answer is no JSON object: ${JSON.stringify(text.slice(0, 80))}`);
  return value as T;
}

/** Returns the objects of a list in an answer; null is an empty one. */
export function items<T extends object>(list: T[] | null | undefined): T[] {
  if (list === null) return [];
  if (!Array.isArray(list) || !list.every(isObject)) throw new ProtocolError("the answer has no list of objects where one should be");
  return list;
}

/** Returns a text of an answer that must be there. */
export function textOf(value: unknown): string {
  if (typeof value !== "string") throw new ProtocolError("the answer has no text where one should be");
  return value;
}

/** Returns a number of an answer, or what stands for none. */
export function numberOf(value: unknown, none?: number): number {
  const n = value ?? none;
  if (typeof n !== "number") throw new ProtocolError("the answer has no number where one should be");
  return n;
}
