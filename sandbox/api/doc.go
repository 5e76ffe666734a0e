// Package api serves sandboxes over HTTP: a Handler over a Fleet and what a store does besides, with its OpenAPI
// document, tokens, and listeners. Package client is its counterpart, and wire what both have in common.
// docs/guides/api.md describes it for users.
//
// A caller is believed in one of two ways: a peer of the Unix socket by the kernel's word that it is root or the user
// of this process, anybody else by a bearer token. Nothing that changes or reads a sandbox is answered otherwise.
package api
