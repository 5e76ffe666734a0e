// Package guest is the host's side of the agent inside a VM: commands, files,
// clock, entropy and power of a running guest, over any byte stream to it.
//
// The guest is hostile. Whatever it sends is bounded before memory is spent
// on it, its names and offsets are checked before they are used, and a guest
// that breaks the protocol loses its connection. What it says of itself
// (process ids, times, exit codes, file contents) is only what it says.
//
// A Client is safe for concurrent use. Each call that is under way has a
// connection to itself, and gives it up when its context ends; a command or a
// transfer has one for as long as it lasts.
package guest
