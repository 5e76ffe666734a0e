// Package console is the virtio console with a single port (virtio 1.2, section
// 5.3): the guest's hvc0.
//
// What the guest prints goes through a bounded ring to a writer on the host, which
// the guest waits for only briefly ([devices.Output]); what is typed at it waits in
// a bounded queue until the guest has buffers for it.
package console
