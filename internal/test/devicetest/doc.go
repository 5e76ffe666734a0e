// Package devicetest is one conformance suite that every virtio device runs: Run
// takes a device through its registers and its queues as a guest would, kind and
// hostile, pauses and moves it under load, and looks at what is left behind.
//
// [Driver] is the guest's side: a virtio driver that knows nothing of the device
// but its registers and guest memory. Tests of a single device use it too.
package devicetest
