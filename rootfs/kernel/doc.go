// Package kernel provides the guest's Linux. Build makes a small one from Debian's linux-source package, which also
// runs on a KVM without hardware virtualisation. Fetch takes Debian's stock cloud kernel unchanged, for ordinary
// KVM.
//
// A Kernel is a folder in a cache, named by a hash of all its inputs: made once, published whole, never changed.
// README.md says what the built kernel contains and why.
package kernel
