// Package upper finds what differs between a VM's disk and its image, and between two moments of the disk.
//
// The one idea of this folder: the root of a VM is an overlay, and everything ever written to it lies in its upper
// directory (Documentation/filesystems/overlayfs.rst). Look walks that directory and no other, and Compare compares
// two walks. Compare looks in the lower directory, the image, only at paths that the walks name. So the cost depends
// on what was written, not on the size of the disk.
package upper
