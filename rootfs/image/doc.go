// Package image keeps the images of VMs in a store on disk: read-only EROFS root filesystems that all VMs share, and
// their records.
//
// A VM's process links this package, so it knows no source of images. Package builder makes them: each source becomes
// one tree of inodes in memory (fstree), whose file contents stay in place, and package erofs writes that tree. Below
// builder, layers reads tar streams, oci registries and archives of container images, and debian makes Debian roots.
//
// # The store
//
//	DIR/images/ID/root.erofs   the image; ID is its SHA-256 in hex
//	DIR/images/ID/image.json   its record: what it is and where it came from
//	DIR/blobs/ALGORITHM-HEX    layers as registries sent them, checked; no image needs them any more
//	DIR/tmp/                   builds under way; garbage after a crash, removed by the next build or Prune
//	DIR/locks/                 lock files (flock): the store's, and one for each spec being built
//
// An image is published by one rename after its files and directories were fsynced, so after a crash at any moment it
// exists whole or not at all. Any number of processes may use a store at the same time.
package image
