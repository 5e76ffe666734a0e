// Package mmio is the virtio-mmio transport, version 2 (virtio 1.2, section 4.2): the registers through which the
// guest's driver finds a device, negotiates features, lays out queues and starts the device.
//
// The guest may write anything to any register at any time, from several vCPUs at once. The transport holds the
// state machine: a write in the wrong state or of the wrong width changes nothing, and the driver cannot change a
// queue once the device uses it. Devices never see a queue that has not been checked.
package mmio
