// Package records has what lists and histories of sandboxes are made of: a sandbox as a row, a command that was run in
// it, a time that it slept, and which of them an answer has; and what package fleet takes and gives besides. It knows
// no store and no VM, and keeps nothing, so that clients of the HTTP API have it on other systems.
package records
