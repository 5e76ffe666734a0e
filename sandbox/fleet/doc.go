// Package fleet presents the sandboxes of a host as rows that products can build on: who owns them, how long they
// last, what happened in them. It lists them, reads their histories, changes their metadata, forks them
// repeatably, and does what is due when they expire. Package sandbox does everything else with a sandbox.
//
// Lists and histories come from the files of the host: see
// docs/adr/0041-lists-and-histories-are-read-from-the-files.md.
package fleet
