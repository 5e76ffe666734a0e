// Package agenttest runs the guest's agent on the host, for tests: behind a Unix socket
// that behaves as the vsock device of a VM does.
package agenttest
