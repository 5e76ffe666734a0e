// Package audit keeps the trail of what is done in a guest through its agent: who ran which command, as which user,
// from when to when, and how it ended.
//
// The trail is a file of JSON lines on the host, beside the Unix socket that stands for the guest's vsock device:
// see Path. A guest.Client that dials this socket with guest.UnixDialer finds it there by itself. Without such a
// file nothing is recorded.
//
// The client writes a line before it asks the guest for anything, and another one at the end. It does not do what it
// cannot record. Any number of processes write whole lines under the file's lock. A new file replaces a full one,
// and KeptFiles older ones are kept. Nothing is synced: docs/guides/audit.md says what a power cut takes.
//
// The trail never has values of environment variables, standard input, output or contents of files. Its content is
// what the programs that use package guest say about themselves: a user who may connect to the socket may also write
// the file.
package audit
