// Package audit is the trail of what is done in a guest through its agent: who has run
// which command, as whom, from when to when, and how it ended.
//
// The trail is a file of JSON lines on the host, beside the Unix socket that stands for the
// guest's vsock device: see Path. A guest.Client that dials this socket by guest.UnixDialer
// finds it there, so nobody has to remember it. Where there is no such file, nothing is
// recorded.
//
// A line is written before the guest is asked for anything, and another one at the end. What
// cannot be recorded is not done. Lines are written whole, by any number of processes, under
// the file's lock; a full file makes way for a new one, and KeptFiles older ones are kept.
// Nothing is synced: what a power cut takes is said in docs/guides/audit.md.
//
// Values of environment variables, standard input, output and contents of files are never
// recorded. Everything is what the programs that use package guest say of themselves:
// whoever may connect to the socket may also write the file.
package audit
