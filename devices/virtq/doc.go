// Package virtq is the device side of a split virtqueue (virtio 1.2, section
// 2.7), and the boundary to a hostile guest.
//
// A descriptor chain is read once, copied, and validated whole when it is
// popped: indices, loops, direction order, zero lengths, indirect tables, and
// every address range against guest RAM, with arithmetic that cannot overflow.
// A device then sees a [Reader] and a [Writer] over ranges that are known to be
// good, so it cannot be talked into touching anything else, and a guest that
// rewrites its rings meanwhile changes nothing that has been looked at.
//
// Errors are of two families. ErrDriver: the guest broke a rule. A bad chain is
// given back to the driver unused and counted; a bad ring stops the queue, and
// the device asks for a reset. Everything else is the host's, and goes to the
// owner of the machine.
package virtq
