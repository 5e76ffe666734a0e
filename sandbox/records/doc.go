// Package records has what lists and histories of sandboxes are made of: a sandbox as a row, a command that was run in
// it, a time that it slept, and which of them an answer has. It knows no store and no VM, and keeps nothing.
package records
