// Package capture has the machine ready when the host captures it, and brings it up to date when it has been restored.
//
// Around a capture it runs the guest's hooks, or freezes the file system. At the capture it stands by at the handover
// ports. After a wake it sets the clock, adds entropy, and gives a clone an identity of its own. On that path nothing
// is allocated, nobody is woken, and every system call counts.
package capture
