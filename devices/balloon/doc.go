// Package balloon is the virtio memory balloon (virtio 1.2, section 5.5): the host
// asks the guest for memory, the guest says which pages it does without, and they
// are given back to the host. Without being asked, it reports pages that happen to
// be free.
//
// The guest may name any page as often as it likes. Giving back a page means that
// it reads as zeros; the guest can harm only itself by that.
package balloon
