// Package tlsname checks the TLS server names of connections that a policy opens for their names.
//
// The programs of package netpolicy redirect such connections from the peer to a listener of the VM's process (see
// there, "Checked names"). A Server reads the ClientHello, asks the rules about its server name, connects to the
// peer that the guest chose, and passes on what it has read, unchanged, and then all that follows in both
// directions. So it forwards exactly the bytes that it judged, whatever the guest does with its segments. It
// resets a connection that is not allowed, and the peer gets no packet of it.
//
// The ClientHello is read strictly: see Hello. A server may ask for a second one (RFC 8446, 4.1.4), which must
// have the same name. Between the first one and the beginning of the server's answer, the Server passes on nothing
// of the client's, so that the second one cannot bypass the check.
//
// The host makes the connection to the peer: from the host's own address, by the host's routes.
package tlsname
