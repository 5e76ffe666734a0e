// Package rng is the virtio entropy device (virtio 1.2, section 5.4). It fills the guest's buffers with random
// bytes of the host's kernel.
//
// It has no state, so a snapshot holds nothing that two clones could share.
package rng
