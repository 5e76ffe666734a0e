// Package hostnet does the host's part for the networks of all its endpoints: it gives each endpoint an address
// that no other live one has, and makes the host translate what they send outside to its own address.
//
// A process takes an address by a lock on a file of that name (flock(2)), which the kernel releases when the
// process ends, however it ends. All processes of a host that have endpoints use the same directory, and must
// agree on the range. An endpoint's IPv6 address contains its IPv4 address, so that one lock covers both.
//
// The translation is an nftables table of its own, "drowse" of family ip, and another one of family ip6. Their
// translation only affects packets from the range of endpoints that leave by an interface other than an
// endpoint's. They do not decide what an endpoint may send or receive: the programs on its TAP device do. Removing
// a table opens nothing.
//
// Only Forward and Forward6 switch forwarding on: a host with net.ipv4.ip_forward, or
// net.ipv6.conf.all.forwarding, routes between all its interfaces. They first add a rule that drops packets that
// are neither from nor to an endpoint, as the host did before.
package hostnet
