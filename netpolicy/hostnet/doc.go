// Package hostnet is what a host does for the networks of all its agents: it gives each
// agent an address that no other live one has, and translates what they send to the
// outside into the host's own address.
//
// An address is taken by a lock on a file of its name (flock(2)), which the kernel gives
// back when the process ends, however it ends. All processes of a host that have agents
// use the same directory, and have to agree on the range.
//
// The translation is a table of nftables of its own, "drowse" of family ip. It only ever
// translates packets from the range of agents that leave by another interface than an
// agent's. It does not decide what may pass: that is done by the programs on each agent's
// TAP device. Removing the table opens nothing.
//
// Nothing here switches forwarding on but Forward, which says so in its name: a host with
// net.ipv4.ip_forward routes between all its interfaces. Forward first adds a rule that
// drops what is neither from nor to an agent, as it was before.
package hostnet
