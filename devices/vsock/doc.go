// Package vsock is the virtio socket device (virtio 1.2, section 5.10): stream
// connections between the guest and Unix sockets of the host, with no help from
// the host's kernel (vhost).
//
// # How the host reaches the guest, and the guest the host
//
// The device listens on a Unix socket, PATH. A client connects and sends one
// line, "CONNECT <port>\n". When somebody in the guest has accepted on that port
// the client reads "OK <host port>\n", and from there on bytes flow. When nobody
// listens in the guest, or the line is not understood, the connection is closed
// without an OK. A client need not wait for the OK before it sends more.
//
// A guest that connects to context ID 2 and port P reaches whoever listens on
// the Unix socket PATH_P; when nobody does, it gets "connection reset". Firecracker
// has the same convention, so its clients work.
//
// A half-closed direction is passed on both ways as SHUTDOWN and shutdown(2).
//
// # One thread, no copies
//
// One goroutine serves the whole device from one epoll set: kicks of the queues,
// the listener and all connections. Bytes go from a socket straight into the
// pages of the guest's receive buffers, and from guest pages straight into a
// socket; only what a socket does not take at once is copied, into a bounded
// buffer of that connection. All that one turn of the loop has put into the rings
// is announced by a single interrupt, and the return of transmitted buffers,
// which nobody waits for, rides on a later one.
//
// # Bounds
//
// Flow control is by credit (virtio 1.2, 5.10.6.3): the guest may have at most
// the advertised buffer in flight on each connection, and a connection that
// exceeds it is reset. The number of connections, the sum of all advertised
// buffers and the number of queued resets are limited, so nothing that the guest
// says makes the host's memory grow beyond about 64 MiB. A host client that does
// not read stops its own connection alone; a guest that gives no receive buffers
// stops its own connections alone.
//
// # What a snapshot keeps
//
// A connection has one end in a host process, so it does not outlive the VM's
// process. The saved state is the list of connections that the guest believes
// in. After a restore the guest is told that they are gone, before it hears
// anything else: by a TRANSPORT_RESET event (virtio 1.2, 5.10.6.7), on which
// Linux fails every connected socket with an error, so that a stream that was
// cut short is not mistaken for one that has ended; listening sockets stay. A
// reset packet would look like a clean end of file to a reader in Linux. New packets
// wait until the driver has given the event buffer back, because Linux works on
// events and packets concurrently and would reset a connection made in between.
// Only when the driver has posted no event buffer, each connection is reset by a
// packet of its own.
//
// Bytes count as received (fwd_cnt) only when a host socket has taken them. So
// what the guest knows to be received is in the socket and stays readable after
// the VM's process has ended. Bytes beyond that, at most one advertised buffer
// for each connection, are lost with the connection when the process ends, and
// the guest's socket fails. When the same process goes on after a pause, no
// connection notices.
package vsock
