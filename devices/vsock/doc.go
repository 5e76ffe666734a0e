// Package vsock is the virtio socket device (virtio 1.2, section 5.10): stream connections between the guest and
// Unix sockets of the host, without vhost in the host's kernel.
//
// # How the host reaches the guest, and the guest the host
//
// The device listens on a Unix socket, PATH. A client connects and sends one line, "CONNECT <port>\n". When a
// process in the guest has accepted on that port the client reads "OK <host port>\n", and from then on bytes flow.
// If no process listens in the guest, or the line is malformed, the device closes the connection without an OK. A
// client may send more before the OK.
//
// A guest that connects to context ID 2 and port P reaches the process that listens on the Unix socket PATH_P. If
// there is none, the guest gets "connection reset". Firecracker has the same convention, so its clients work.
//
// A device may do without paths. Its owner passes a listening socket (Config.Listener), and a function that connects
// the guest to ports of the host (Config.Connect). Code of the same process uses Device.Dial and Device.Listen.
//
// The device passes half-closed directions on both ways, as SHUTDOWN and shutdown(2).
//
// # One thread, no copies
//
// One goroutine serves the whole device from one epoll set: kicks of the queues, the listener and all connections.
// Bytes go from a socket straight into the pages of the guest's receive buffers, and from guest pages straight into
// a socket. The device copies only what a socket does not take at once, into a bounded buffer of that connection. A
// single interrupt announces all that one turn of the loop has put into the rings. The return of transmitted
// buffers, for which the driver does not wait, shares a later interrupt.
//
// # Bounds
//
// Flow control is by credit (virtio 1.2, 5.10.6.3). The guest may have at most the advertised buffer in flight on
// each connection, and the device resets a connection that exceeds it. The number of connections, the sum of all
// advertised buffers and the number of queued resets are limited, so the guest cannot make the host's memory grow
// beyond about 64 MiB. A call of Config.Connect counts as a connection until it is answered, even if the guest has
// given up. A host client that does not read stops only its own connection; a guest that gives no receive buffers
// stops only its own connections.
//
// # What a snapshot keeps
//
// A connection has one end in a host process, so it does not outlive the VM's process. The saved state is the list
// of connections that exist for the guest, and of those that it waits for, which a restore refuses. After a restore
// the device first tells the guest that they are gone, by a TRANSPORT_RESET event (virtio 1.2, 5.10.6.7). Linux
// then fails every connected socket with an error, so that a program does not mistake a truncated stream for a
// complete one; listening sockets stay. A reset packet would look like a clean end of file to a reader in Linux.
// New packets wait until the driver has given the event buffer back, because Linux works on events and packets
// concurrently and would reset a connection made in between. Only if the driver has posted no event buffer does the
// device reset each connection by a packet of its own.
//
// A parked connection (Device.Park) has no host process yet, so it outlives the VM's process, and the first client
// after a restore need not wait until the guest accepts. As an event would end it too, it is kept only if all other
// connections end at the same port of the guest: those the device resets by packets. A service whose port is parked
// must know the end of its streams by their content.
//
// Bytes count as received (fwd_cnt) only when a host socket has taken them. So what the guest knows as received is
// in the socket and stays readable after the VM's process has ended. Bytes beyond that, at most one advertised
// buffer for each connection, are lost with the connection when the process ends, and the guest's socket fails. If
// the same process resumes after a pause, no connection notices.
package vsock
