// Package devicetest is one conformance suite that every virtio device runs. Run takes a device through its
// registers and its queues as a guest would, friendly and hostile. It pauses and moves the device under load, and
// checks what is left behind.
//
// [Driver] is the guest's side: a virtio driver that knows only the device's registers and guest memory. Tests of
// a single device use it too.
package devicetest
