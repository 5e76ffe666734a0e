// Package mcp serves sandboxes as tools to a language model, by the Model Context Protocol
// (https://modelcontextprotocol.io): make, run commands, files, sleep, fork, network policy, ports, delete.
//
// The client is trusted: it runs as the server's user. The model is not, since what it reads may instruct it. So
// Options say all that it may reach: sandboxes of one owner, images, network destinations, and their number and size.
// No tool takes a path of the host. Whatever fails, also a wrong argument, is the result of a tool call whose text says
// what to do, and not an error of the protocol. Results, commands and calls are bounded.
//
// A call that is canceled, or whose client has gone, ends with its command. Sandboxes stay, and sleep when they are
// idle.
package mcp
