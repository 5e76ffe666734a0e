export * from "./client.js";
export * from "./errors.js";
export type { Body, CallOptions, SocketClass } from "./http.js";
export { Port, Process, type Completed, type Exit, type Output } from "./process.js";
export type * as types from "./types.js";
