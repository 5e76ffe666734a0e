// Package net is the virtio network device (virtio 1.2, section 5.1) with one
// pair of queues, on a TAP device of the host (package tap) or anything else that
// takes and gives one frame for each write(2) and read(2).
//
// Frames go from guest pages to the TAP and from the TAP into guest pages by
// vectored system calls, with the header that says what is left to do for the
// receiver: checksums, segmentation. A large segment of TCP so crosses as one
// frame. What the guest writes in that header is looked at before the call, so
// that nonsense costs nothing, and the kernel, which reads it once more, is the
// one that decides.
//
// One goroutine serves both queues and the TAP. When the guest has no receive
// buffers the device stops reading until it is kicked, and the host's queue of
// the TAP fills and drops; when the TAP takes no more the device waits for it, and
// also looks again after a while. Neither stops the other direction.
//
// While the link is down nothing is read from the TAP, so what has come in for a
// guest that is being woken is not lost, and what the guest sends is dropped. A
// device that is made with the link down stays so after Import, until SetLink.
package net
