// Package handover is where the VMM and the agent in its guest meet at the instant of a
// capture and of a resume: three I/O ports of one byte.
//
// Over vsock a word takes interrupts, wake-ups and a dozen system calls, which is most
// of the time to wake a guest whose kernel is slow. At these ports the agent stands in
// user space (ioperm(2)): it writes CommandStandBy and reads the status until that is no
// longer StatusWait. Meanwhile the capture is taken. In the guest that goes on, the status
// is StatusGoOn; in every guest that is restored from the capture it is StatusResumed, so
// the first instructions that run are the agent's, with the message for it a few reads
// away: no interrupt, no wake-up and no change of tasks comes before it.
//
//	offset  read             written
//	0       status           -
//	1       message, by byte -
//	2       -                command
//
// Neither side waits for the other without end. The VMM lets a guest go on when it has
// waited long enough, and where there is no such device, reads give 0xff, which is not
// StatusWait. A guest that does what it likes at these ports gets the numbers above, and
// the message that is for it anyway.
package handover
