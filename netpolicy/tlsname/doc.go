// Package tlsname checks the names in TLS of connections that a policy opens for their names.
//
// The programs of package netpolicy send such connections to a listener of the VM's process
// instead of to the peer (see there, "Checked names"). A Server reads the ClientHello, asks the
// rules about its server name, connects to the peer that the guest has chosen, and passes on what
// it has read, unchanged, and then all that follows in both directions. So the bytes that are
// judged are those that are sent on, whatever the guest does with its segments. A connection that
// is not allowed is reset, and the peer never hears of it.
//
// A ClientHello is read strictly: see Hello. A server may ask for a second one (RFC 8446, 4.1.4);
// it has to have the same name. Nothing of the client's is passed on between the first one and
// the beginning of the server's answer, so that the second one cannot slip by.
//
// The connection to the peer is the host's: from the host's own address, by the host's routes.
package tlsname
