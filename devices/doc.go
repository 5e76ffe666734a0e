// Package devices defines what a device is to the machine that holds it: the interfaces of virtio devices, of
// devices that can pause and of devices with state, the bus that carries MMIO and port I/O to them, and the event
// and worker that every queue runs on.
//
// A device knows its queues and its configuration space. It does not know how the guest reaches them (package
// mmio), or where the bytes of a request come from or go to.
package devices
