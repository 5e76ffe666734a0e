// Package hostnet is what a host does for the networks of all its endpoints: it gives each
// endpoint an address that no other live one has, and translates what they send to the
// outside into the host's own address.
//
// An address is taken by a lock on a file of its name (flock(2)), which the kernel gives
// back when the process ends, however it ends. All processes of a host that have endpoints
// use the same directory, and have to agree on the range. Its IPv6 address has the one of
// IPv4 in it, so that one lock is for both.
//
// The translation is a table of nftables of its own, "drowse" of family ip, and another one of
// family ip6. They only ever translate packets from the range of endpoints that leave by another interface than an
// endpoint's. They do not decide what may pass: that is done by the programs on each endpoint's
// TAP device. Removing a table opens nothing.
//
// Nothing here switches forwarding on but Forward and Forward6, which say so in their names: a
// host with net.ipv4.ip_forward, or net.ipv6.conf.all.forwarding, routes between all its
// interfaces. They first add a rule that drops what is neither from nor to an endpoint, as it was before.
package hostnet
