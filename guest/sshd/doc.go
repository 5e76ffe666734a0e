// Package sshd speaks the SSH server protocol on the host, for a guest that has no SSH
// server, key or port: sessions, file transfer and forwards are carried out by the agent.
//
// It asks nobody who they are. Whoever reaches it could have reached the agent: it is
// served on the standard input and output of a command that needs the permissions of the
// state directory. So do not serve it on a port.
package sshd
