// Package records has the parts of lists and histories of sandboxes: a sandbox as a row, a command that ran in it,
// a time that it slept, and the filters of an answer. It also has the other types that package fleet takes and
// returns. It uses no store and no VM, and stores nothing, so clients of the HTTP API can use it on other systems.
package records
