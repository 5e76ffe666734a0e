// Package capture prepares the machine for a capture by the host, and brings it up to date after a restore.
//
// Around a capture it runs the guest's hooks, or freezes the file system. During the capture it stands by at the
// handover ports. After a wake it sets the clock, adds entropy, and gives a clone an identity of its own. On that
// path it allocates nothing and wakes no thread, and every system call counts.
package capture
