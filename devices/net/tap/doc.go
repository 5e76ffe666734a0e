// Package tap makes and opens TAP devices: Ethernet interfaces of the host whose
// wire is a file descriptor of this process.
//
// A device that Create makes is not persistent. It exists as long as its
// descriptor is open, so it vanishes with the process, however that ends. Nothing
// here runs another program; it needs CAP_NET_ADMIN.
package tap
