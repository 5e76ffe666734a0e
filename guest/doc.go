// Package guest is the host's side of the agent inside a VM. It gives access to commands, files, clock, entropy and
// power of a running guest, over any byte stream to it.
//
// The guest is hostile. The package bounds all that the guest sends before it spends memory on it, checks names and
// offsets before it uses them, and drops the connection of a guest that breaks the protocol. It cannot verify what
// the guest says about itself (process ids, times, exit codes, file contents).
//
// A Client is safe for concurrent use. Each call has a connection to itself while it runs, and gives it up when its
// context ends. A command or a transfer keeps its connection for as long as it lasts.
package guest
