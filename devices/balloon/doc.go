// Package balloon is the virtio memory balloon (virtio 1.2, section 5.5). The guest reports pages that are free at
// the moment, and the device gives them back to the host. It also gives back the pages that the guest inflates by
// itself: the host does not ask it for memory.
//
// The guest may name any page as often as it likes. A page that is given back reads as zeros, so the guest can
// harm only itself.
package balloon
