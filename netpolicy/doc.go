// Package netpolicy is where the network policy of each sandbox will live: a model of
// what a guest may reach, compiled to a specification, and the eBPF program on the
// guest's TAP device that enforces and accounts for it. None of it exists yet: a VM has
// no network, or with `drowse run --net tap` a plain link to its host.
package netpolicy
