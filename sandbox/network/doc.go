// Package network is the host's end of a VM's link: a TAP device with its policy, the names that the guest asks for,
// the check of names in TLS, and the proxy. It knows nothing of the guest, nor of the device that the guest sees: that
// one only has the TAP device's descriptor.
package network
