// Package handover lets the VMM and the agent in its guest meet at the instant of a capture and of a resume. It is
// three I/O ports of one byte.
//
// Over vsock a message takes interrupts, wake-ups and a dozen system calls. That is most of the time to wake a
// guest whose kernel is slow. At these ports the agent stands by in user space (iopl(2)): it writes
// CommandStandBy and reads the status until that is no longer StatusWait. Meanwhile the VMM takes the capture. In
// the guest that goes on, the status is then StatusGoOn. In each guest restored from the capture it is
// StatusResumed. There the agent's instructions are the first to run, its message is a few reads away, and no
// interrupt, wake-up or task switch comes before.
//
//	offset  read             written
//	0       status           -
//	1       message, by byte -
//	2       -                command
//
// Neither side waits for the other forever. The VMM lets a guest go on when it has waited long enough. Without the
// device, reads give 0xff, which is not StatusWait. A guest that misuses the ports gets the numbers above, and the
// message that is meant for it anyway.
package handover
