// Package upper says what differs between a VM's disk and its image, and between two moments of the disk.
//
// The one idea of this folder: the root of a VM is an overlay, and all that was ever written to it lies in its upper
// directory (Documentation/filesystems/overlayfs.rst). Look walks that directory and no other, Compare tells two walks
// apart; the lower directory, the image, is only asked about paths that the walks name. So the cost is that of what was
// written, not of what there is.
package upper
