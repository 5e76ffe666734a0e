// Package control is the protocol between a VM's process and its callers: orders and reports when the process
// starts, later requests on its control socket (HTTP with JSON), and errors that keep their identity on the way.
package control
