// Package image turns a source (a set of Debian packages, a container image of a registry or in files, a tar stream, or
// a directory of the host) into a read-only EROFS root filesystem that all VMs share, and keeps these images in a store
// on disk.
//
// The one idea of this folder: every source becomes the same in-memory tree of inodes (package fstree), whose file
// contents stay where they are (in the host's directory, or in spool files filled from tar streams), and one writer
// (package erofs) turns that tree into an EROFS image. No unpacked copy of a root filesystem is ever left on the host.
//
// # What an image holds
//
// Everything the source holds, unchanged in path, type, mode (setuid, setgid, sticky), owner, modification time (ns),
// symlink target, device number, extended attributes (file capabilities, POSIX ACLs, user, trusted and security names),
// hard links (one inode, an honest link count) and content, except:
//
//   - Sockets are left out, as they mean nothing without the process that made them. They are counted in [fstree.Skipped].
//   - Extended attributes that EROFS has no name space for (such as btrfs.*) are left out and counted.
//   - A directory source does not cross mount points, bind mounts included: what is mounted there is left out, an empty
//     directory (or an empty file) stays in its place, and it is counted.
//   - Times of archives outside of 1970 to 9999 become the nearest of these, and are counted.
//   - Caches and logs of the package manager are trimmed from Debian images (see debianTrim), documentation only when
//     [Options.NoDocs] is set. Credentials of the host (proxies, mirror passwords) are never part of an image.
//   - What a VM needs is added (see addVMFiles): the mount points /dev /proc /sys /run /tmp, /etc/hostname, an empty
//     /etc/resolv.conf and an empty /etc/machine-id.
//
// Data is stored uncompressed: images of one store are shared by all VMs through the host's page cache, and a guest
// kernel that is slower than native code (soft KVM) must not decompress. Blocks of zeros are holes in the image file.
//
// # Layers
//
// The layers of a container image are read at the same time (layer.go), each into a list of entries and a spool of its
// own, and then put on the tree one after the other (merge.go), by the OCI image specification. An archive is hostile:
// every count, size and depth that it says has a bound, its links exist in the tree alone, and its digests are checked
// (manifest.go, layered.go).
//
// # The store
//
//	DIR/images/ID/root.erofs   the image; ID is its SHA-256 in hex
//	DIR/images/ID/image.json   what it is and where it came from
//	DIR/blobs/ALGORITHM-HEX    layers as registries gave them, checked; images need none of them any more
//	DIR/tmp/                   builds under way; garbage after a crash, removed by the next build or Prune
//	DIR/locks/                 lock files (flock): the store's, and one for each spec being built
//
// An image is published by one rename after its files and directories were fsynced, so after a crash at any moment it
// is there whole or not at all. A store may be used by any number of processes at once.
package image
