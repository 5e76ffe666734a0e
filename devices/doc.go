// Package devices says what a device is to the machine that holds it: the
// interfaces of virtio devices, of what can pause and of what has state, the bus
// that carries MMIO and port I/O to them, and the event and worker that every
// queue runs on.
//
// A device knows its queues and its configuration space. How they are reached
// (package mmio), and where the bytes of a request come from or go to, is not
// its business.
package devices
