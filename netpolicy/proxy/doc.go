// Package proxy is an HTTP proxy for one VM (an endpoint), which can put secrets into its requests.
//
// A Server listens at netpolicy.ProxyPort of the gateway's address on the endpoint's device. It opens nothing that the
// endpoint's policy does not: every connection that it makes is judged by the rules that judge packets.
//
//   - Requests with an absolute http:// target are passed on, each by itself.
//   - CONNECT opens a tunnel. Where the rules open the peer for its name alone, and names are checked at the port
//     (netpolicy, "Checked names"), what comes through has to begin with a ClientHello for that very name.
//   - CONNECT to a host that gets a secret ends here: the server shows a certificate of the endpoint's own authority
//     (Identity), reads requests, and makes a TLS connection of its own to the host, whose certificate it verifies.
//
// # How a target is judged
//
// A host is a name or an IPv4 address, in the one form that it has (see Target). A name is resolved once for each
// connection, by the endpoint's resolver: so only names of rules are, and only public addresses come back. Each address
// is put to the rules (Rules.Opens), and the one that was allowed is connected to, by number. The peer may be public,
// or private if a rule says so; the floor, the host itself and other endpoints are never connected to from here. There
// is no IPv6. Redirects are the client's to follow. When the policy changes, connections that it would not open are
// cut.
//
// # How a secret gets into a request
//
// The endpoint has a placeholder: a text without meaning, see Identity.Placeholder. If a request is for a host of an
// injection, at its port, over TLS, and the value of its header is the prefix and the placeholder and nothing else,
// then the placeholder is replaced by the secret. Nothing else of a request is changed for it, and to all others the
// placeholder goes as it is. The request is sent only after the host's certificate has been verified. In answers of
// such hosts, the very bytes of a secret are replaced by asterisks, in fields and in bodies that are not compressed;
// the server is asked not to compress. When and in which pieces an answer is given on does not depend on the secret,
// unless all of it is there: see ADR 0056.
//
// # What a client cannot do
//
// Requests are parsed by net/http and written anew, so that there is one idea of where each ends: of a message that
// has both a length and chunks, the chunks count, and the connection ends with it. Fields that are for one
// connection are not passed on, nor are trailers. There is no HTTP/2 and no upgrade to another protocol. What
// a client may use is in the constants of this package; nothing is logged for what it does.
package proxy
