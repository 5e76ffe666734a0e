// Package sshd speaks the SSH server protocol on the host, for a guest that has no SSH server, key or port. The
// agent carries out sessions, file transfer and forwards.
//
// It authenticates no client. A client that reaches it could have reached the agent: it is served on the standard
// input and output of a command that needs the permissions of the state directory. So do not serve it on a port.
package sshd
