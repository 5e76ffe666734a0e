// Package e2b serves the wire of E2B's SDKs on a host's sandboxes: its control plane (create, connect, pause, fork,
// snapshots), and the protocol of what E2B runs in each sandbox (processes, files, watches), which ends here on the
// host. Guests have nothing for it: requests become those of package guest's protocol, so processes and their output
// are kept by the agent, and outlive sleeps of their VM and restarts of this server.
//
// A sandbox of this wire has spec.Metadata.E2B, and its name is the sandboxID. Clients and guests are hostile:
// all that they can hold here is bounded. Nothing is served without a key or a token of the sandbox, except for
// /health and files with a signature. Fields that ask for what cannot be done are refused by name.
package e2b
