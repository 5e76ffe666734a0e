// Package net is the virtio network device (virtio 1.2, section 5.1) with one pair of queues. It works on a TAP
// device of the host (package tap), or on anything else that moves one frame with each write(2) and read(2).
//
// Vectored system calls move frames from guest pages to the TAP and back. A header in front of each frame says
// what the receiver has yet to do: checksums, segmentation. So a large TCP segment crosses as one frame. The
// device checks the guest's header before the call, so that nonsense costs no call. The kernel checks it again,
// and its verdict counts.
//
// One goroutine serves both queues and the TAP. While the guest has no receive buffers, the device does not read
// the TAP until the guest kicks it, and the host's queue of the TAP fills up and drops frames. While the TAP takes
// no more, the device waits for it, and also tries again after a while. Neither wait stops the other direction.
//
// While the link is down the device does not read the TAP, so frames for a guest that is waking are not lost, and
// drops what the guest sends. A device made with the link down keeps it down after Import, until SetLink.
//
// If the TAP's interface is removed, the link goes down (EBADFD). A Linux guest would do nothing about a device that
// needs a reset, and its snapshot would keep that for good; so the next process has a link again.
package net
