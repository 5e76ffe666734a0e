// Package kernel provides the guest's Linux: Build makes a small one from Debian's linux-source package, which also
// runs on a KVM without hardware virtualisation, and Fetch takes Debian's stock cloud kernel as it is, for ordinary
// KVM.
//
// A Kernel is a folder in a cache, named by a hash of all that went into it: made once, published whole, never changed.
// README.md tells what the built kernel contains and why.
package kernel
