// Package virtq is the device side of a split virtqueue (virtio 1.2, section 2.7), and the boundary to a hostile
// guest.
//
// Pop reads a descriptor chain once, copies it and validates all of it: indices, loops, direction order, zero
// lengths, indirect tables, and every address range against guest RAM, with arithmetic that cannot overflow. A
// device then sees a [Reader] and a [Writer] over valid ranges, so a guest cannot make it touch anything else. A
// guest that rewrites its rings meanwhile does not change the copy.
//
// There are two families of errors. ErrDriver: the guest broke a rule. The queue counts a bad chain and gives it
// back unused; a bad ring stops the queue, and the device asks for a reset. All other errors are the host's, and go
// to the owner of the machine.
package virtq
