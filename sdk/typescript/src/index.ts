export * from "./client.js";
export {
  APIError, CommandFailed, Conflict, ConnectionFailed, DeadlineExceeded, DrowseError, Forbidden, InvalidRequest, KeyReused, NotFound, PreconditionFailed,
  ProtocolError, ServerError, StreamLost, TooManyRequests, Unauthorized,
} from "./errors.js";
export type { Body, CallOptions, SocketClass } from "./http.js";
export { Port, Process, type Completed, type Exit, type Output } from "./process.js";
export type * as types from "./types.js";
