// Package builder makes images from every kind of source: a set of Debian packages, a container image of a registry or
// in files, a tar stream, a directory of the host, and the steps of a build file.
//
// Every source becomes the same tree of inodes (package fstree), whose file contents stay in place (in the host's
// directory, or in spool files filled from tar streams). No unpacked copy of a root filesystem is left on the host.
//
// # What an image holds
//
// Everything the source holds, unchanged in path, type, mode (setuid, setgid, sticky), owner, modification time (ns),
// symlink target, device number, extended attributes (file capabilities, POSIX ACLs, user, trusted and security names),
// hard links (one inode, a correct link count) and content, except:
//
//   - Sockets are left out, as they mean nothing without the process that made them. [fstree.Skipped] counts them.
//   - Extended attributes that EROFS has no name space for (such as btrfs.*) are left out and counted.
//   - A directory source does not cross mount points, bind mounts included: what is mounted there is left out, an empty
//     directory or file takes its place, and it is counted.
//   - Times of archives outside of 1970 to 9999 become the nearest of these, and are counted.
//   - Caches and logs of the package manager are trimmed from Debian images (see package debian), documentation only
//     when [Options.NoDocs] is set. Credentials of the host (proxies, mirror passwords) are never part of an image.
//   - What a VM needs is added (see complete.go): the mount points /dev /proc /sys /run /tmp, /etc/hostname, an empty
//     /etc/resolv.conf and an empty /etc/machine-id.
//
// Data is stored uncompressed: images of one store are shared by all VMs through the host's page cache, and a guest
// kernel that is slower than native code (soft KVM) must not decompress. Blocks of zeros are holes in the image file.
package builder
