// Package control is what a VM's process and its callers say to each other: orders and reports when it starts, requests
// on its control socket (HTTP with JSON) later, and errors that keep their identity on the way.
package control
