// Package fleet has the sandboxes of a host as rows that products are built on: whose they are, how long they last,
// what has been done in them. It lists them, tells their history, changes what is said of them, forks them so that it
// may be repeated, and does what is due when their time is over. What else is done with a sandbox is package sandbox's.
//
// Lists and histories are read from the files of the host: see
// docs/adr/0041-lists-and-histories-are-read-from-the-files.md.
package fleet
