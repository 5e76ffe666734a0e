// Package rpc carries calls with descriptors between a VM's privileged process, the keeper, and the confined one, its
// child. Both ends are equal: each calls, each serves calls, and a handler may call back.
//
// # Whose files
//
// Files move. A file given to this package, by Call or as a handler's reply, belongs to it: it closes the file once it
// has been sent, and also if sending fails. A file taken from this package belongs to who takes it: the handler, or the
// caller of Call. Dup makes a duplicate for who wants to keep a file.
//
// # What a hostile peer can do
//
// The child may be in the hands of its guest. An end that breaks a rule loses the connection, and nothing else
// happens: its messages are bounded by MaxMessage and MaxFiles, and its calls and posts in progress by MaxCalls each.
// Descriptors of what is refused are closed. Sending never waits for the peer: a message that the socket has no room
// for waits in a queue, which the same bounds hold. If the first in it is not taken in half a minute, the connection
// ends.
//
// A handler must expect any body, and any kind of file: one that blocks, one that is a directory, one that the peer
// still has. Names of methods consist of letters, digits and "._-/". Texts of errors are printable, and at most 4 KiB.
//
// # On the wire
//
// The socket is SOCK_SEQPACKET, so the kernel keeps descriptors with their packet. A message is one packet with a
// header (see wire.go), and packets with the rest of its body if it exceeds 64 KiB. Of system calls, a connection makes
// recvmsg, sendmsg, close, fcntl, and those of Go's poller.
package rpc
