// Package jail runs a VM in a confined process.
//
// The keeper is the process that a VM's owner knows: it has the record, the locks, the sockets and the network. It
// starts a child, which holds all that a guest can attack: RAM, KVM, devices, the pager and the writer of snapshots
// (package instance). The child sees no file but those of its VM's shares, no process and no network, and may use few
// system calls (package confine). Everything that it needs comes as descriptors, or it asks the keeper (package rpc),
// which compares the request with what the operation under way needs.
//
// What the child says is a stranger's word: the keeper chooses all names, writes manifests itself after it has checked
// them, and bounds every text.
package jail
