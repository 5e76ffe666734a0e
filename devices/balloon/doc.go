// Package balloon is the virtio memory balloon (virtio 1.2, section 5.5): the guest
// reports pages that happen to be free, and they are given back to the host. So are
// those that it puts into the balloon by itself: the host does not ask it for memory.
//
// The guest may name any page as often as it likes. Giving back a page means that
// it reads as zeros; the guest can harm only itself by that.
package balloon
