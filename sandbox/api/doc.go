// Package api serves sandboxes over HTTP: a Handler for a Fleet and its store, the OpenAPI document, tokens, and
// listeners. Package client is its counterpart, and package wire is what both share. docs/guides/api.md describes
// it for users.
//
// It knows a caller in one of two ways: by the kernel, which says that a peer of the Unix socket is root or the
// user of this process, or by a bearer token. Other callers can neither change nor read a sandbox.
package api
