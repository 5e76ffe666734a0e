// Package network is the host's end of a VM's link: a TAP device with its policy, the names that the guest asks for,
// the check of names in TLS, and the proxy. It knows nothing of the guest, nor of the device that the guest sees: that
// one only has the TAP device's descriptor.
//
// The keeper's half has the device, the policy and all sockets. What the guest and its peers say is read by the other
// half, a worker, which is alone in a confined process (Main) where the host can confine. See docs/adr/0058.
package network
