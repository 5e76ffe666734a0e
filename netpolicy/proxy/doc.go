// Package proxy is an HTTP proxy for one VM (an endpoint). It can put secrets into the endpoint's requests.
//
// A Server listens at netpolicy.ProxyPort of the gateway's address on the endpoint's device. It opens nothing that
// the endpoint's policy does not open: the rules that judge packets also judge every connection that it makes.
//
//   - It forwards requests with an absolute http:// target, each by itself.
//   - CONNECT opens a tunnel. If the rules open the peer for its name alone, and names are checked at the port
//     (netpolicy, "Checked names"), the client must begin with a ClientHello for that very name.
//   - CONNECT to a host that gets a secret ends here: the server shows a certificate of the endpoint's own authority
//     (Identity), reads requests, and makes a TLS connection of its own to the host, whose certificate it verifies.
//
// # How a target is judged
//
// A host is a name or an IPv4 address, in its one valid form (see Target). The endpoint's resolver resolves a name
// once for each connection, so only names in rules resolve, and only to public addresses. The proxy puts each
// address to the rules (Rules.Opens) and connects to an allowed one by number. The peer may be public, or private
// if a rule says so; the proxy never connects to the floor, the host itself or other endpoints. There is no IPv6.
// The client must follow redirects itself. When the policy changes, the proxy cuts connections that the new policy
// would not open.
//
// # How a secret is injected
//
// The endpoint has a placeholder: a text without meaning, see Identity.Placeholder. The proxy replaces it by the
// secret if a request is for a host of an injection, at its port, over TLS, and the value of its header is exactly
// the prefix and the placeholder. It changes nothing else in the request for that, and passes the placeholder
// unchanged to all other hosts. It sends the request only after it has verified the host's certificate. In answers
// of such hosts, it replaces the exact bytes of a secret by asterisks, in fields and in bodies that are not
// compressed, and it asks the server not to compress. When and in which pieces it passes an answer on does not
// depend on the secret, unless the answer has all of it: see ADR 0056.
//
// # What a client cannot do
//
// net/http parses requests and the proxy writes them anew, so that there is one idea of where each ends: if a
// message has both a length and chunks, the chunks count, and the connection ends with it. The proxy does not
// forward fields for one connection, nor trailers. There is no HTTP/2 and no upgrade to another protocol. The
// constants of this package bound what a client may use. The proxy does not log what a client does.
package proxy
