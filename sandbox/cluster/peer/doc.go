// Package peer carries requests for a sandbox from the host of a cluster that got them to the one that has the sandbox.
//
// Hosts speak HTTP over TLS 1.3, in which both ends show a key. Each process makes its own, and the SHA-256 of the
// public one stands in its session's record in the store where the hosts meet: who can write there is a host, and
// nobody else. A key counts while its session does.
//
// The first host lets the caller in, and asserts who that is: Passed. The second one judges by that as if the caller
// had come to it. A client cannot assert anything: only requests that come through Peers.Serve have a Passed, and Pass
// replaces the header field in which it travels. A request is passed on once.
package peer
