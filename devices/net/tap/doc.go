// Package tap makes TAP devices: Ethernet interfaces of the host whose wire is a file descriptor of this process.
//
// A device from Create is not persistent. It exists while its descriptor is open, so it vanishes with the process,
// however the process ends. The package runs no other program. It needs CAP_NET_ADMIN.
package tap
